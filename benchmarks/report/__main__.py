"""Draw everything again that records hold: the plots, and the tables of a comparison.

    python -m benchmarks.report benchmarks/results/amd-epyc-2-cores --out results

It reads results.json and the records of `benchmarks.report.pictures`, those of them that are in the folder.
"""

import argparse
import json
from pathlib import Path

from benchmarks.harness.records import why_not_writable
from benchmarks.report.pictures import DRAWN
from benchmarks.report.publish import publish

COMPARISON = "results"


def read(path: Path) -> dict:
    """A record. ValueError is raised where the file holds none."""
    record = json.loads(path.read_text())
    if "machine" not in record:
        raise ValueError("no record of a benchmark")
    return record


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what compare, record or pytest benchmarks --record has written")
    parser.add_argument("--out", type=Path, metavar="PATH", help="folder for what is drawn, by default FOLDER")
    options = parser.parse_args(argv)
    out = options.out or options.folder
    records = {}
    for name in (COMPARISON, *DRAWN):
        path = options.folder / f"{name}.json"
        try:
            if path.exists():
                records[name] = read(path)
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if not records:
        parser.error(f"nothing to draw from in {options.folder}: no {', '.join((COMPARISON, *DRAWN))}.json")
    if reason := why_not_writable(out):
        parser.error(f"--out: {reason}")
    for name in DRAWN:
        if name in records:
            written = DRAWN[name](records[name]["groups"], records[name]["machine"], out)
            print(f"Written to {out}: {', '.join(written)}")
    if COMPARISON in records:
        print(publish(records[COMPARISON], out))


if __name__ == "__main__":
    main()
