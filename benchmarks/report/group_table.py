"""The rows of a suite's record and how they compare, in the terminal, in 80 columns."""

from benchmarks.harness.rows import totals
from benchmarks.report.comparison_table import per_device


def tables(record: dict) -> str:
    """A table for each group of a suite's record, or the one of a record of memory, whose rows take no turns."""
    if "groups" in record:
        return "\n\n".join(table(group) for group in record["groups"])
    return held_memory(record["rows"])


def table(group: dict) -> str:
    """A line for each row: its median over the rounds, and the spread of the rounds. Below them the comparisons."""
    heading = f"medians of {group['rounds']} rounds"
    lines = [group["group"], f"{heading:>70}{'spread':>9}"]
    for name, row in group["rows"].items():
        lines.append(f"  {name:<46}{row['median']:>12.1f} {group['unit']:<9}{row['spread']:>9.0%}")
    if group["pairs"]:
        lines.append(comparisons(group))
    return "\n".join(lines)


def comparisons(group: dict) -> str:
    """A line for each pair of rows: the median over rounds of their ratio or difference, and its interval."""
    confidence = min(pair["confidence"] for pair in group["pairs"])
    heading = f"medians of {group['rounds']} rounds ({confidence:.0%} interval)"
    lines = [f"{heading:>79}"]
    for pair in group["pairs"]:
        median = pair["median"]
        low, high = pair["interval"]
        if pair["kind"] == "ratio":
            rows = f"  {pair['of']} / {pair['to']}"
            value = f" {median:.3f} ({low:.3f} to {high:.3f})"
        else:
            rows = f"  {pair['of']} − {pair['to']}"
            value = f" {median:.1f} ({low:.1f} to {high:.1f}) {group['unit']}"
        lines.append(rows + value.rjust(79 - len(rows)))
    return "\n".join(lines)


def held_memory(rows: dict[str, list[dict[str, int]]]) -> str:
    """A line for each row of `suites.sharing`: the MiB that each rank holds."""
    lines = ["MiB that each rank holds"]
    for name, ranks in rows.items():
        lines.append(f"  {name:<46}{per_device(totals(ranks)):>31}")
    return "\n".join(lines)
