"""What each of four ranks holds at level 02: of a copy of the network under DDP, with FSDP, and on a mesh of 2 × 2.

    python -m benchmarks.suites.sharing benchmarks/results/my-machine

It counts bytes by `common.memory`, and times nothing: so it stands apart from the suites that pytest runs.
`benchmarks.report` draws the picture.
"""

import argparse
from pathlib import Path

from benchmarks.harness import level_runs, records
from common import ladder
from common.processes import ranks

RANKS = 4
NAMES = {"02_ddp_raw": "DDP", ladder.FSDP: "FSDP", ladder.MESH: "mesh of 2 × 2"}


def measure() -> dict:
    """The record: by the name of each way the bytes of each rank, by category."""
    flags = ["--dataset", "synthetic", "--batch-size", "64"]
    rows = {}
    for script, name in NAMES.items():
        rows[name] = ranks(RANKS, on_cpu=True).run(level_runs.held, script, flags, 1)
    return {"machine": records.machine(), "began": records.run_metadata(), "rows": rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.sharing", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for sharing.json")
    folder = parser.parse_args(argv).folder
    if reason := records.why_not_writable(folder):
        parser.error(reason)
    records.write_json(folder / "sharing.json", measure())


if __name__ == "__main__":
    main()
