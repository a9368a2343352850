"""One rank of `benchmarks.suites.network`: it does the jobs that arrive as lines on stdin and answers on stdout.

torchrun starts it once on each node. A job names the port at which the ranks meet for it, so that no job finds the keys
of an earlier one.
"""

import contextlib
import io
import json
import os
import sys
from unittest import mock

import torch

from benchmarks.harness import level_runs
from benchmarks.harness.lanes import record_rank
from benchmarks.harness.rows import RAW_DDP
from benchmarks.suites.throughput import WARM_UP_STEPS, Configuration, Steps
from common.allocator import keep_large_blocks


def throughput(nodes: int, batch_per_process: int, steps: int) -> float | None:
    """Level 02's images per second over the first nodes, by this rank's clock; None of a node that stays idle."""
    if int(os.environ["RANK"]) >= nodes:
        return None
    level = Configuration(RAW_DDP, nodes, batch_per_process * nodes)
    argv = [*level.argv(Steps(WARM_UP_STEPS, steps)), "--dataset", "synthetic", "--device", "cpu"]
    with mock.patch.dict(os.environ, WORLD_SIZE=str(nodes)):
        return level_runs.train(RAW_DDP, argv, threads=1)["images_per_sec"]


JOBS = {"throughput": throughput, "record_rank": record_rank}


def main() -> None:
    keep_large_blocks()  # as the levels do, but before the first tensor of the first job
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one core a node, as though each had its own
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 opens a store at the job's port, not torchrun's agent
    for line in sys.stdin:
        name, port, arguments = json.loads(line)
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()):
            answer = JOBS[name](**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
