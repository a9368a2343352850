"""One rank of `benchmarks.suites.network`: it does the jobs that arrive as lines on stdin and answers on stdout.

torchrun starts it once on each node; a job names the port at which the ranks meet for it, so that none finds an earlier
one's keys.
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
from benchmarks.suites.throughput import WARM_UP_STEPS, Configuration, Steps
from common.allocator import keep_large_blocks

LEVEL = "02_ddp_raw"


def throughput(batch_per_process: int, steps: int) -> float:
    """Level 02's images per second over all ranks, by this rank's clock."""
    world_size = int(os.environ["WORLD_SIZE"])
    level = Configuration(LEVEL, world_size, batch_per_process * world_size)
    argv = [*level.argv(Steps(WARM_UP_STEPS, steps)), "--dataset", "synthetic", "--device", "cpu"]
    result = level_runs.train(LEVEL, argv, threads=1)
    return result["images_per_sec"]


def alone(batch_per_process: int, steps: int) -> float | None:
    """The same of rank 0 as the only process there is; None elsewhere, where nothing is done meanwhile."""
    if os.environ["RANK"] != "0":
        return None
    with mock.patch.dict(os.environ, WORLD_SIZE="1"):
        return throughput(batch_per_process, steps)


def main() -> None:
    keep_large_blocks()  # as the levels do, but before the first tensor of the first job
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one core a node, as though each had its own
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 opens a store at the job's port, not torchrun's agent
    jobs = {job.__name__: job for job in (throughput, alone, record_rank)}
    for line in sys.stdin:
        name, port, arguments = json.loads(line)
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()):
            answer = jobs[name](**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
