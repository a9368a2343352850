"""The report as one page that loads nothing: verdicts, tables, plots, and the levels' scripts side by side."""

import base64
import html
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.predict import page as prediction
from benchmarks.report.plots import place
from benchmarks.report.verdicts import listed, memory_source, verdicts
from benchmarks.suites.memory import cells
from common import ladder
from common.ladder import html_page
from common.memory import CATEGORIES

ALT = {
    "throughput.png": "Images per second of each level, with quartiles",
    "memory.png": "Peak memory of each device under DataParallel and DDP on 2, 4 and 8 devices, by category",
    "overhead.png": "Microseconds that each abstraction adds to a step, with quartiles",
}
# Drawn from records of other suites: shown where they lie beside the comparison's.
LANES = {
    "timeline-threads.png": "Lanes of DataParallel's threads during one step",
    "timeline-1-gbit.png": "Lanes of two ranks during one step over 1 Gbit/s, for five ways to average gradients",
    "timeline-100-mbit.png": "The same over 100 Mbit/s",
    "overlap.png": "What each way of averaging gradients adds to a step, with quartiles, and the bytes it sends",
}


class _Section(NamedTuple):
    """A part of the page.

    Attributes:
        title: its heading, and its line in the table of contents.
        text: HTML that stands beside the pictures where the window is wide enough, else above them.
        pictures: HTML of the pictures.
        below: HTML that needs the whole width.
        above: the same, before the text.
    """

    title: str
    text: str = ""
    pictures: str = ""
    below: str = ""
    above: str = ""

    @property
    def anchor(self) -> str:
        words = re.findall("[a-z]+", self.title.lower())
        return "-".join(words)

    def markup(self) -> str:
        beside = ""
        if self.text or self.pictures:
            beside = f'<div class="beside"><div>{self.text}</div><div>{self.pictures}</div></div>'
        heading = f'<h2 id="{self.anchor}">{html.escape(self.title)}</h2>'
        return f"<section>{heading}{self.above}{beside}{self.below}</section>"


def render(report: dict, folder: Path, drawn: list[str], missing: list[str], busy: str | None, tables: dict) -> str:
    """The page for a report whose plots `drawn` lie in `folder`; `missing` says of the others why they are not there.

    `tables` are the comparison's: by title the rows, headings first.
    """
    rungs = [level for level in ladder.levels() if level in report["levels"]]
    sections = [
        _Section(
            "Levels",
            f"<p>{html.escape(_what_is_what(report))}</p>",
            _plot("throughput.png", folder, drawn, missing),
            above="".join(f"<h3>{html.escape(title)}</h3>{_table(rows)}" for title, rows in tables.items()),
        ),
        _Section(
            "Memory per device",
            "<p>DataParallel keeps the weights, the optimizer's state, the gathered outputs and the summed gradients "
            "on its first device. Under DDP every device holds the same. So the peaks are equal, but need not be "
            "lower: buckets for the gradients come on top, under “communication”.</p>",
            _plot("memory.png", folder, drawn, missing),
            _memory(report) + _tensors(report),
        ),
        _Section(
            "Overhead of a step",
            "<p>The network computes next to nothing, so the picture shows what each abstraction adds to a step of a "
            "hand-written loop that does the same.</p>",
            _plot("overhead.png", folder, drawn, missing),
        ),
        *_lanes(folder),
        _Section("How many GPUs pay? A prediction", below=prediction.section()),
        _Section(
            "The scripts, each beside the next",
            above="<p>Orange goes, blue comes, and bold letters changed within a line. Of the equal lines only those "
            f"around a change are shown.</p>{html_page.side_by_side(rungs)}",
        ),
    ]
    links = [f'<a href="#{section.anchor}">{html.escape(section.title)}</a>' for section in sections]
    contents = f'<nav aria-label="Contents">{" ".join(links)}</nav>'
    parts = [_header(report, busy), _verdicts(report), contents]
    parts += [section.markup() for section in sections]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>The parallelism ladder, compared</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{html_page.STYLE}{STYLE}{prediction.STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _header(report: dict, busy: str | None) -> str:
    state = ""
    if report["interrupted"]:
        state = '<p class="warning">Incomplete: the run was interrupted. What is missing was not run.</p>'
    if busy:
        state += f'<p class="warning">{html.escape(busy)}</p>'
    for failure in report["failures"]:
        part = html.escape(failure["part"])
        message = html.escape(failure["message"])
        state += f'<details class="warning"><summary>Failed: {part}</summary><pre>{message}</pre></details>'
    datasets = {result["run"]["dataset"] for result in report["levels"].values() if "run" in result}
    dataset = listed(sorted(datasets)) if datasets else "no dataset"
    return (
        "<h1>The parallelism ladder, compared</h1>"
        f'<p class="place">{html.escape(place(report["machine"]))}; {dataset}, '
        f"global batch {report['global_batch_size']}, {report['steps']} steps, "
        f"{report['world_size']} processes or replicas</p>{state}"
    )


def _verdicts(report: dict) -> str:
    classes = {True: "kept", False: "broken", None: "open"}
    signs = {True: "✓", False: "✗", None: "?"}
    items = "".join(
        f'<li class="{classes[verdict.kept]}"><b>{signs[verdict.kept]}</b> {html.escape(verdict.line)}</li>'
        for verdict in verdicts(report)
    )
    return f'<ul class="verdicts">{items}</ul>'


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = "".join(_table_row(row, "td") for row in body)
    return f'<div class="wide"><table><thead>{_table_row(head, "th")}</thead><tbody>{lines}</tbody></table></div>'


def _table_row(cells: list[str], tag: str) -> str:
    shown = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{shown}</tr>"


def _what_is_what(report: dict) -> str:
    rounds = (report.get("throughput") or [{"rounds": 0}])[0]["rounds"]
    return (
        f"Throughput is measured: the median of {rounds} rounds in which the levels take turns, and the width of their "
        f"middle half as a share of it. Accuracy and evaluated samples are of one run of {report['steps']} steps. "
        f"Memory is {memory_source(report['levels'])}. "
        f"Weights are those after {report['proof_steps']} steps in float64 without dropout: their checksum is taken to "
        "four decimals, and |Δw| is the largest distance of one from level 00's."
    )


def _plot(name: str, folder: Path, drawn: list[str], missing: list[str]) -> str:
    if name not in drawn:
        said = [line for line in missing if line.startswith(name)]
        return f'<p class="warning">{html.escape(" ".join(said))}</p>'
    return _figure(folder / name, ALT[name])


def _figure(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" width="800"></figure>'


def _lanes(folder: Path) -> list[_Section]:
    """The section on what happens in one step, where the suites `timeline` or `overlap` left pictures."""
    figures = [_figure(folder / name, alt) for name, alt in LANES.items() if (folder / name).exists()]
    if not figures:
        return []
    text = (
        "<p>Each bar is recorded. Naive averaging sends when backward has ended, so the times of both add up. "
        "Overlapped averaging sends a gradient while backward computes the next one. Buckets send many gradients in "
        "one message, because each message costs time whatever its size.</p>"
    )
    return [_Section("What happens in one step", text, "".join(figures))]


def _memory(report: dict) -> str:
    """The numbers of the plot: device 0 by category, then the totals."""
    rows = [["network", "wrapper", "devices", *CATEGORIES, "device 0", "emptiest", "ratio", "source"]]
    for row in report.get("memory") or []:
        rows.append([row["title"], row["wrapper"], str(row["devices"]), *cells(row), row["source"]])
    if len(rows) == 1:
        return ""
    summary = "<summary>The same as numbers: MiB on device 0 at its peak, by category</summary>"
    return f'<details class="numbers">{summary}{_table(rows)}</details>'


def _tensors(report: dict) -> str:
    """The largest tensors of BasicNet's training on device 0, by wrapper, for the largest number of devices."""
    rows = [row for row in report.get("memory") or [] if row["network"] == "basic_net"]
    most = max((row["devices"] for row in rows), default=0)
    lines = [["wrapper", "category", "tensor", "made by", "shape", "MiB"]]
    for row in rows:
        if row["devices"] == most:
            for tensor in row.get("tensors", []):
                shape = " × ".join(map(str, tensor["shape"]))
                size = f"{tensor['size'] / 2**20:.2f}"
                lines.append(
                    [row["wrapper"], tensor["category"], tensor["name"] or "–", tensor["operation"], shape, size]
                )
    if len(lines) == 1:
        return ""
    summary = f"<summary>The largest tensors on device 0 of {most}, BasicNet</summary>"
    return f'<details class="numbers">{summary}{_table(lines)}</details>'


STYLE = """
h1 { font-size: 1.7em; line-height: 1.2; margin: .6em 0 .2em; }
h2 { font-size: 1.3em; margin: 1.8em 0 .4em; padding-top: .5em; border-top: 1px solid var(--line); }
h3 { font-size: 1.05em; margin: 1.6em 0 .6em; }
p { max-width: 46em; }
.place { color: var(--soft); margin-top: 0; }
.verdicts { list-style: none; padding: 0; display: grid; gap: 8px; }
.verdicts li { padding: 8px 14px; border-left: 5px solid; border-radius: 4px; background: var(--shade);
  font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; font-size: .92em; overflow-wrap: anywhere; }
.verdicts .kept { border-color: #009e73; } .verdicts .kept b { color: #009e73; }
.verdicts .broken { border-color: #d55e00; } .verdicts .broken b { color: #d55e00; }
.verdicts .open { border-color: #b0b0b0; }
.warning { border-left: 5px solid #e69f00; background: var(--shade); padding: 8px 14px; border-radius: 4px; }
.warning pre { overflow-x: auto; font-size: 12px; }
.wide { overflow-x: auto; margin: 1em 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
th, td { padding: 5px 12px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { position: sticky; left: 0; padding-left: 4px; background: var(--paper);
  text-align: left; }
figure { margin: 1em 0; }
nav { display: flex; flex-wrap: wrap; gap: 6px 20px; margin: 1.4em 0 0; }
nav a { color: var(--ink); }
@media (min-width: 1180px) {
  .beside { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 800px); gap: 32px; }
  .beside figure { margin-top: 0; }
}
figure img { display: block; height: auto; max-width: 100%; background: #fff; border-radius: 6px; }
.numbers summary { cursor: pointer; color: var(--soft); }
"""
