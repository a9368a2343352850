"""A group of a suite in the terminal, in 80 columns."""

WIDTH = 80


def table(group: dict) -> str:
    """Rows with median, quartiles and spread, then pairs with their intervals; of an anatomy the parts of each step."""
    unit = f"{group['unit']}, medians of {group['rounds']} rounds"
    lines = [group["group"], f"  {unit:<40}{'median':>10}{'quartiles':>17}{'spread':>8}"]
    rows = group["rows"]
    for name, row in rows.items():
        quartiles = f"{number(row['low'])} – {number(row['high'])}"
        noisy = " *" if row["noisy"] else ""
        lines.append(f"  {name:<40}{number(row['median']):>10}{quartiles:>17}{row['spread']:>8.1%}{noisy}")
    for pair in group["pairs"]:
        sign = "/" if pair["kind"] == "ratio" else "−"
        shown = "{:.3f}".format if sign == "/" else number
        median = shown(pair["median"])
        low, high = map(shown, pair["interval"])
        left = f"  {pair['of']} {sign} {pair['to']}"
        right = f"{median} ({low} to {high})"
        lines.append(f"{left} {right:>{max(0, WIDTH - 1 - len(left))}}")
    if any(row["noisy"] for row in rows.values()):
        lines.append("  * noisy: a spread over 15 %")
    if any("parts" in row for row in rows.values()):
        lines += _parts(list(rows.values()))
    return "\n".join(lines)


def _parts(rows: list[dict]) -> list[str]:
    """The milliseconds of each part of a step, with a column for each row."""
    heads = [f"{row['short']:>7}" for row in rows]
    lines = [f"  {'ms of a step':<29}{''.join(heads)}"]
    for part in rows[0]["parts"]:
        cells = [f"{row['parts'][part]['median']:>7.2f}" for row in rows]
        lines.append(f"  {part:<29}{''.join(cells)}")
    wholes = [f"{row['median']:>7.2f}" for row in rows]
    lines.append(f"  {'the whole, timed apart':<29}{''.join(wholes)}")
    return lines


def number(value: float) -> str:
    """Four digits, three below 1, without an exponent for anything that a table holds."""
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.3g}"
