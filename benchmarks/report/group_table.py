"""The rows of a suite's record and how they compare, in the terminal, in 79 columns."""

from benchmarks.harness.records import Group, read_group, totals
from benchmarks.report.cells import per_device

TABLE_WIDTH = 79
ROW_COLUMNS = "  {:<46}{:>12} {:<9}{:>9}"
HEAD_COLUMNS = "{:>70}{:>9}"
MEMORY_COLUMNS = "  {:<46}{:>31}"


def tables(record: dict) -> str:
    """A table for each group of a suite's record, or the one of a record of memory, whose rows take no turns."""
    if "groups" in record:
        return "\n\n".join(table(read_group(group)) for group in record["groups"])
    return held_memory(record["rows"])


def table(group: Group) -> str:
    """A line for each row: its median over the rounds, and their spread. Below them is a line for each comparison."""
    heading = f"medians of {group.rounds} rounds"
    lines = [group.title, HEAD_COLUMNS.format(heading, "spread")]
    for name, row in group.rows.items():
        lines.append(ROW_COLUMNS.format(name, f"{row.summary.median:.1f}", group.unit, f"{row.summary.spread:.0%}"))
    if group.comparisons:
        lines.append(comparisons(group))
    return "\n".join(lines)


def comparisons(group: Group) -> str:
    """A line for each pair of rows: the median over rounds of their ratio or difference, and its interval."""
    confidence = min(comparison.interval.confidence for comparison in group.comparisons)
    heading = f"medians of {group.rounds} rounds ({confidence:.0%} interval)"
    lines = [heading.rjust(TABLE_WIDTH)]
    for pair, summary, interval in group.comparisons:
        if pair.kind == "ratio":
            rows = f"  {pair.of} / {pair.to}"
            value = f" {summary.median:.3f} ({interval.low:.3f} to {interval.high:.3f})"
        else:
            rows = f"  {pair.of} − {pair.to}"
            value = f" {summary.median:.1f} ({interval.low:.1f} to {interval.high:.1f}) {group.unit}"
        lines.append(rows + value.rjust(TABLE_WIDTH - len(rows)))
    return "\n".join(lines)


def held_memory(rows: dict[str, list[dict[str, int]]]) -> str:
    """A line for each row of `suites.sharing`: the MiB that each rank holds."""
    lines = ["MiB that each rank holds"]
    for name, ranks in rows.items():
        lines.append(MEMORY_COLUMNS.format(name, per_device(totals(ranks))))
    return "\n".join(lines)
