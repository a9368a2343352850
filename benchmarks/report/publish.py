"""Everything that a comparison leaves for its readers: the table in the terminal, plots, and a page."""

from pathlib import Path

from benchmarks.report import page, plots
from benchmarks.report.table import SPEED_HEADINGS, busy, cells, notes, speed_cells, speed_title, table
from benchmarks.report.verdicts import verdicts
from benchmarks.report.wrapping import wrapped
from common.files import write_atomically

PAGE_HEADINGS = [
    "level",
    "processes",
    "accuracy",
    "evaluated",
    "peak MiB per device",
    "weight checksum",
]


def publish(report: dict, folder: Path) -> str:
    """Draw the plots, write `report.html`, and return what to print: table, notes, errors, and the files' names."""
    drawn, missing = plots.draw(report, folder)
    tables = {}
    for group in report.get("throughput") or []:
        tables[speed_title(group)] = [SPEED_HEADINGS, *speed_cells(group)]
    tables["What each level computed"] = [PAGE_HEADINGS, *cells(report)]
    text = page.render(report, folder, drawn, missing, busy(report), tables)
    write_atomically(folder / "report.html", text)
    lines = [f"{failure['part']}:\n{failure['message']}\n" for failure in report["failures"]]
    lines += [table(report), "", notes(report)]
    lines += [wrapped(line) for line in missing]
    written = [name for name in ("results.json", *drawn, "report.html") if (folder / name).exists()]
    lines.append(wrapped(f"Written to {folder}: {', '.join(written)}"))
    return "\n".join(lines)


def exit_code(report: dict) -> int:
    """130 if the user stopped it, 1 if a level failed or a promise is broken or could not be checked, else 0."""
    if report["interrupted"]:
        return 130
    all_kept = all(verdict.kept for verdict in verdicts(report))
    return 1 if report["failures"] or not all_kept else 0
