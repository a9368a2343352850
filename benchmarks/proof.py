"""What makes the levels comparable: their float64 weights, and their bytes per device.

Runs levels one after another in this process, or under torchrun in each of its processes, and writes into a folder
`LEVEL.pt`, the weights after a run in float64 without dropout, and `LEVEL.RANK.json`, the peaks of a separate run
under memory accounting:

    python -m benchmarks.proof FOLDER 00_single_gpu,01_data_parallel 20 --batch-size 64
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from common import ladder
from common.accounting import accounting
from common.args import parse_args


def prove(folder: Path, level: str, steps: int, flags: list[str]) -> None:
    """Both runs of one level; `flags` are the flags that it shares with the others."""
    module = ladder.load(level)
    exact = ["--dtype", "float64", "--no-dropout", "--max-steps", str(steps), "--eval-samples", "100"]
    meet_anew()
    module.train(parse_args(module.__file__, [*flags, *exact, "--save", str(folder / f"{level}.pt")]))

    args = parse_args(module.__file__, [*flags, "--max-steps", "2", "--eval-samples", "100"])
    meet_anew()
    with accounting() as ledger:
        module.train(args)
    rank = os.environ.get("RANK", "0")
    (folder / f"{level}.{rank}.json").write_text(json.dumps(list(ledger.peaks().values())))


def meet_anew() -> None:
    """Give the next process group of these ranks a store of its own: in a used one they find the last group's keys."""
    if "RANK" not in os.environ:
        return
    host, rank = os.environ["MASTER_ADDR"], int(os.environ["RANK"])
    torchruns = dist.TCPStore(host, int(os.environ.setdefault("TORCHRUN_PORT", os.environ["MASTER_PORT"])))
    meeting = torchruns.add(f"meetings of rank {rank}", 1)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind((host, 0))
            torchruns.set(f"meeting {meeting}", str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = torchruns.get(f"meeting {meeting}").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def main() -> None:
    folder, levels, steps, *flags = sys.argv[1:]
    for level in levels.split(","):
        prove(Path(folder), level, int(steps), flags)


if __name__ == "__main__":
    main()
