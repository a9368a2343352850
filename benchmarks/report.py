"""What a comparison says: in the terminal, in 80 columns, and through plots and a page.

Redraws everything from the results alone:

    python -m benchmarks.report results/results.json
"""

import argparse
import json
import textwrap
from pathlib import Path

from benchmarks import page, plots
from benchmarks.verdicts import memory_source, peaks, verdicts
from common import ladder

COLUMNS = "{:<16} {:>5} {:>8} {:>8} {:>8} {:>6} {:>12} {:>8}"


def introduction(report: dict) -> str:
    """What is about to run, and what to expect of it."""
    machine = report["machine"]
    hardware = ", ".join(machine["gpus"]) or "no GPU"
    what = (
        f"torch {machine['torch']}, {machine['cores']} CPU cores, {hardware}. "
        f"Every level: global batch {report['global_batch_size']}, {report['steps']} steps, seed 42."
    )
    return f"{wrapped(what)}\n{wrapped(expectation(report))}"


def expectation(report: dict) -> str:
    """What parallelism can bring on this machine, and why it may be nothing."""
    machine, n, batch = report["machine"], report["world_size"], report["global_batch_size"]
    gpus, cores = len(machine["gpus"]), machine["cores"]
    if n == 1:
        return (
            "Expect every level to be about as fast as level 00: each is one process, and differs in what its "
            "abstraction adds to a step. What shows here is that nothing else changes."
        )
    if gpus > 1 and gpus >= n:
        return (
            f"Expect no speed-up from {n} GPUs: at batch {batch} a GPU computes a step of this small network in less "
            "time than its kernels take to launch, and DDP's all-reduce comes on top. Larger networks and batches "
            "gain. What holds at any size: equal weights, exact evaluation, even memory under DDP."
        )
    if gpus:
        return (
            f"Expect {n} processes to be slower than one: they share {'one GPU' if gpus == 1 else f'{gpus} GPUs'}, and "
            "their gradients travel through the CPU. What holds here too: equal weights, exact evaluation, even memory."
        )
    shared = f"{cores} cores" if cores > 1 else "core"
    return (
        f"Expect {n} processes to be about as fast as one, or slower: they share the {shared} that one has "
        "alone, and the all-reduce of their gradients comes on top. Where it was recorded, two processes on two cores "
        "were slower than one at batch 64 and faster at 256. What shows here is that nothing but speed and memory "
        "changes."
    )


HEADINGS = (("", "level"), ("pro-", "cess"), ("", "accuracy"), ("eval-", "uated"), ("images", "per s"), ("", "spread"))
HEADINGS += (("peak MiB", "per device"), ("weight", "checksum"))


def table(report: dict) -> str:
    """The comparison in 80 columns; a dash where there is no result."""
    rows = [*zip(*HEADINGS, strict=True), *cells(report)]
    return "\n".join(COLUMNS.format(*row).rstrip() for row in rows)


def cells(report: dict) -> list[list[str]]:
    """What the table says of each level."""
    rows, times = [], timed(report)
    for level, result in report["levels"].items():
        run, row = result.get("run"), times.get(level)
        rows.append(
            [
                level,
                str(run["world_size"] if level in ladder.DISTRIBUTED else 1) if run else "–",
                f"{run['accuracy']:.2%}" if run else "–",
                str(run["evaluated"]) if run else "–",
                f"{row['median']:.0f}" if row else "–",
                f"{row['spread']:.0%}" + "*" * row["noisy"] if row else "–",
                per_device(peaks(result)) or "–",
                result.get("weight_checksum", "–"),
            ]
        )
    return rows


def timed(report: dict) -> dict[str, dict]:
    """Of each level the throughput at the usual batch: a row of `benchmarks.records.group`."""
    groups = report.get("throughput") or [{"rows": {}}]
    return {row["level"]: row for row in groups[0]["rows"].values()}


def wrapped(text: str) -> str:
    return textwrap.fill(text, 80, break_on_hyphens=False)


def per_device(sizes: list[int]) -> str:
    """'51', '39 22' or, where all but the first are alike, '38 7×16'; empty for no devices."""
    if not sizes:
        return ""
    first, *others = [f"{size / 2**20:.0f}" for size in sizes]
    if len(others) > 1 and len(set(others)) == 1:
        others = [f"{len(others)}×{others[0]}"]
    return " ".join([first, *others])


def notes(report: dict) -> str:
    """What the columns mean, what did not run, and the verdicts."""
    runs = [result["run"] for result in report["levels"].values() if "run" in result]
    names = ", ".join(sorted({run["dataset"] for run in runs})) or "none"
    rows = timed(report)
    lines = ["NOT MNIST: synthetic digits."] if "synthetic" in names else []
    lines += [wrapped(f"Dataset: {names}, {report['steps']} steps. Memory: {memory_source(report['levels'])}.")]
    if rows:
        count = report["throughput"][0]["rounds"]
        noisy = " *: noisy." * any(row["noisy"] for row in rows.values())
        lines.append(wrapped(f"Images per s: median of {count} rounds in turn; spread: their middle half.{noisy}"))
    lines.append(f"Weights: after {report['proof_steps']} steps in float64 without dropout, to four decimals.")
    lines += [wrapped(line) for line in (*troubles(report), *(verdict.line for verdict in verdicts(report)))]
    return "\n".join(lines)


def troubles(report: dict) -> list[str]:
    """A line for each part that failed, and one if the user stopped it."""
    lines = [f"FAILED: {failure['part']}" for failure in report["failures"]]
    if report["interrupted"]:
        lines.append("INTERRUPTED: what is missing was not run.")
    return lines


def exit_code(report: dict) -> int:
    """130 if the user stopped it, 1 if a level failed or a promise is broken or could not be checked, else 0."""
    if report["interrupted"]:
        return 130
    return int(bool(report["failures"]) or not all(verdict.kept for verdict in verdicts(report)))


def publish(report: dict, folder: Path) -> str:
    """Draw the plots, write `report.html`, and return what to print: table, notes, errors, and the files' names."""
    drawn, missing = plots.draw(report, folder)
    headings = ["level", "processes", "accuracy", "evaluated", "images/s", "spread", "peak MiB per device"]
    headings.append("weight checksum")
    text = page.render(report, folder, drawn, missing, expectation(report), [headings, *cells(report)])
    (folder / "report.html").write_text(text)
    errors = [f"{failure['part']}:\n{failure['message']}\n" for failure in report["failures"]]
    written = [name for name in ("results.json", *drawn, "report.html") if (folder / name).exists()]
    files = wrapped(f"Written to {folder}: {', '.join(written)}")
    return "\n".join([*errors, table(report), "", notes(report), *map(wrapped, missing), files])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a results.json of benchmarks.compare")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="folder for plots and page, by default that of RESULTS"
    )
    options = parser.parse_args()
    try:
        report = json.loads(options.results.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"no results of a comparison in {options.results}: {error}")
    folder = options.out or options.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    print(publish(report, folder))


if __name__ == "__main__":
    main()
