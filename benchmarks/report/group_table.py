"""A group of a suite in the terminal, in 80 columns."""

WIDTH = 80


def table(group: dict) -> str:
    """Rows with median, quartiles and spread, then pairs with their intervals."""
    unit = f"{group['unit']}, medians of {group['rounds']} rounds"
    lines = [group["group"], f"  {unit:<40}{'median':>10}{'quartiles':>17}{'spread':>8}"]
    rows = group["rows"]
    for name, row in rows.items():
        quartiles = f"{number(row['low'])} – {number(row['high'])}"
        noisy = " *" if row["noisy"] else ""
        lines.append(f"  {name:<40}{number(row['median']):>10}{quartiles:>17}{row['spread']:>8.1%}{noisy}")
    if group["pairs"]:
        confidence = min(pair["confidence"] for pair in group["pairs"])
        interval = f"({confidence:.0%} interval)"
        lines.append(f"{interval:>{WIDTH - 1}}")
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
    return "\n".join(lines)


def number(value: float) -> str:
    """Four digits, three below 1, without an exponent for anything that a table holds."""
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.3g}"
