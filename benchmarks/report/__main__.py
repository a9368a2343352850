"""Draw everything again that records hold: the pictures, and the tables of a comparison.

python -m benchmarks.report benchmarks/results/intel-xeon-2-cores
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report.comparison_table import summary, wrapped
from benchmarks.report.pictures import COMPARISON, PICTURES, draw


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of records")
    folder = parser.parse_args(argv).folder
    drawn = []
    for name in PICTURES:
        path = folder / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            drawn += draw(name, record, folder)
            if name == COMPARISON:
                print(summary(record))
    if not drawn:
        sys.exit(f"There is nothing to draw in {folder}: no {', '.join(f'{name}.json' for name in PICTURES)}")
    print(wrapped(f"Written to {folder}: {', '.join(drawn)}"))


if __name__ == "__main__":
    main()
