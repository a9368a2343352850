"""Runs of a level's own train.py: its processes, its flags, and the jobs of its ranks."""

import contextlib
import functools
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.harness.options import TIMEOUT_SECONDS, WARM_UP_STEPS
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import REPLICATED
from common import ladder
from common.args import parse_args
from common.cores import threads_per_worker
from common.data import mnist_on_disk
from common.launch import read_launch
from common.memory import track_memory
from common.processes import ranks
from common.start import prepare_process

EVALUATE_FEW = ["--eval-samples", "100"]
SIMULATED = ["--device", "cpu", "--max-steps", str(WARM_UP_STEPS + 1), *EVALUATE_FEW]
STATE = ("parameters", "gradients", "optimizer state")
load_once = functools.cache(ladder.load)  # A rank trains one level in many rounds, and executes its file once.


def processes_of(script: str, world_size: int) -> int:
    """The number of processes that train a script on `world_size` devices; it is one for a script without ranks."""
    return world_size if ladder.runs_on_ranks(script) else 1


def flags_on(script: str, devices: int, global_batch_size: int) -> list[str]:
    """The flags of a script on so many devices, which share the global batch; those of the data are not among them."""
    flags = ["--batch-size", str(global_batch_size)]
    if script == REPLICATED:
        flags += ["--replicas", str(devices)]
    if script == ladder.MESH:
        flags += ["--tensor", "1" if devices % 2 else "2"]
    return flags


def run_on_devices(job: Callable, script: str, devices: int, flags: Sequence[str], on_cpu: bool = False) -> list[Any]:
    """The results of `job(script, flags)` on each process of a script on so many devices, in the order of ranks.

    Raises RankFailed if a rank fails. `on_cpu` is that of `common.processes`.
    """
    return ranks(processes_of(script, devices), on_cpu).run(job, script, flags, timeout=TIMEOUT_SECONDS)


def find_dataset() -> tuple[str, ...]:
    """The levels' flags for MNIST if it is on disk, else for the synthetic digits; nothing is downloaded."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    if mnist_on_disk(root):
        return ("--dataset", "mnist", "--data-dir", str(root))
    return ("--dataset", "synthetic")


def run_level(level: str, flags: Sequence[str]) -> dict:
    """The result of the level; what it prints is left out. A rank has the threads of its device, or of its share."""
    module = load_once(level)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        args = prepare_process(parse_args(module.__file__, flags))
        # A rank begins a job with one thread, and a run on a GPU would leave it with that.
        torch.set_num_threads(threads_per_worker(read_launch().local_world_size))
        return module.train(args)


def peaks(level: str, flags: Sequence[str]) -> list[dict[str, int]]:
    """The peak bytes of each device of this process: of its rank, or of every replica.

    They are simulated on the CPU, on machines with GPUs too: replicas that share a GPU would be charged to it together,
    and the threads of `nn.DataParallel` are not seen.
    """
    with track_replicas() as tracker:
        run_level(level, [*flags, *SIMULATED])
    return list(tracker.peaks().values())


def held(level: str, flags: Sequence[str]) -> dict[str, int]:
    """The bytes of parameters, gradients and optimizer state on this rank when the optimizer has taken its last step.

    By then the rank has freed what it gathered from the others.
    """
    held_now: dict[str, int] = {}
    with track_memory() as tracker, register_optimizer_step_post_hook(lambda *_: held_now.update(tracker.now())):
        run_level(level, [*flags, *SIMULATED])
    return {category: held_now[category] for category in STATE}
