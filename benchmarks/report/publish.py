"""What a comparison leaves for its readers: the table in the terminal, and plots."""

from pathlib import Path

from benchmarks.report import plots
from benchmarks.report.table import notes, table, wrapped
from benchmarks.report.verdicts import verdicts


def publish(report: dict, folder: Path) -> str:
    """Draw the plots, and return what to print: errors, table, notes, and the files' names."""
    drawn, missing = plots.draw(report, folder)
    lines = [f"{failure['part']}:\n{failure['message']}\n" for failure in report["failures"]]
    lines += [table(report), "", notes(report)]
    lines += [wrapped(line) for line in missing]
    written = [name for name in ("results.json", *drawn) if (folder / name).exists()]
    lines.append(wrapped(f"Written to {folder}: {', '.join(written)}"))
    return "\n".join(lines)


def exit_code(report: dict) -> int:
    """130 if the user stopped it, 1 if a level failed or a promise is broken or could not be checked, else 0."""
    if report["interrupted"]:
        return 130
    all_kept = all(verdict.kept for verdict in verdicts(report))
    return 1 if report["failures"] or not all_kept else 0
