"""Draw everything again that records hold: the pictures, and the tables of a comparison.

    python -m benchmarks.report benchmarks/results/amd-epyc-2-cores --out results

It reads the records of `benchmarks.report.pictures`, those of them that are in the folder.
"""

import argparse
import json
from pathlib import Path

from benchmarks.harness.records import why_not_writable
from benchmarks.report.pictures import COMPARISON, PICTURES, draw
from benchmarks.report.table import summary, wrapped


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what compare or pytest benchmarks --record has written")
    parser.add_argument("--out", type=Path, metavar="PATH", help="folder for what is drawn, by default FOLDER")
    options = parser.parse_args(argv)
    out = options.out or options.folder
    records = {}
    for name in PICTURES:
        path = options.folder / f"{name}.json"
        try:
            if path.exists():
                records[name] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    if not records:
        parser.error(f"nothing to draw from in {options.folder}: no {', '.join(PICTURES)}.json")
    if reason := why_not_writable(out):
        parser.error(f"--out: {reason}")
    drawn = []
    for name, record in records.items():
        drawn += draw(name, record, out)
    if COMPARISON in records:
        print(summary(records[COMPARISON]))
    print(wrapped(f"Written to {out}: {', '.join(drawn)}"))


if __name__ == "__main__":
    main()
