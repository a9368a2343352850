"""Runs of a level's own train.py: the jobs of its ranks, and the configurations in which it is timed."""

import contextlib
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.harness.options import TIMEOUT_SECONDS
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import BASELINE, REPLICATED
from common import ladder
from common.args import parse_args
from common.cores import threads_per_worker
from common.instruments.result import quantity
from common.launch import read_launch
from common.memory import track_memory
from common.processes import ranks
from common.start import prepare_process

ACCOUNTED_STEPS = 3  # DDP has its final buckets from the second step on
EVALUATE_FEW = ["--eval-samples", "100"]
SIMULATED = ["--device", "cpu", "--max-steps", str(ACCOUNTED_STEPS), *EVALUATE_FEW]
STATE = ("parameters", "gradients", "optimizer state")
load = functools.cache(ladder.load)  # A rank trains one level in many rounds, and executes its file once.


def processes_of(script: str, world_size: int) -> int:
    """The number of processes that train a script on `world_size` devices; it is one for a script without ranks."""
    return world_size if ladder.runs_on_ranks(script) else 1


def run_level(level: str, flags: Sequence[str]) -> dict:
    """The result of the level; what it prints is left out. A rank has the threads of its device, or of its share."""
    module = load(level)
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


class Steps(NamedTuple):
    """The steps of one sample: those of a warm-up, which are not counted, and those that are."""

    warm_up: int
    counted: int


@dataclass(frozen=True)
class Configuration:
    """A level, or a script beside it, as one row measures it.

    Attributes:
        workers: processes, or at level 01 replicas. Each has a device of its own.
        cores_per_device: the cores of each device; None where devices are not made of cores.
        all_cores: the row apart, whose one device has all cores.
    """

    level: str
    workers: int
    global_batch_size: int
    cores_per_device: int | None = None
    all_cores: bool = False

    @property
    def name(self) -> str:
        return f"{BASELINE}, all cores" if self.all_cores else row_name(self.level, self.workers)

    def argv(self, steps: Steps) -> list[str]:
        """The level's flags for these steps, without those of the data."""
        # Evaluation is not timed, so it gets one sample for each rank.
        argv = ["--batch-size", str(self.global_batch_size), "--eval-samples", str(self.workers)]
        argv += ["--warm-up-steps", str(steps.warm_up), "--max-steps", str(steps.warm_up + steps.counted)]
        if self.level == REPLICATED:
            argv += ["--replicas", str(self.workers)]
        if self.cores_per_device is not None:
            argv += ["--cores-per-device", str(self.cores_per_device)]
        return argv

    def run(self, steps: Steps, data_flags: tuple[str, ...]) -> dict:
        """The slowest rank's result of a training of these steps. Raises RankFailed if a rank fails."""
        argv = [*self.argv(steps), *data_flags]
        processes = processes_of(self.level, self.workers)
        results = ranks(processes).run(run_level, self.level, argv, timeout=TIMEOUT_SECONDS)
        return min(results, key=lambda result: result["images_per_sec"])


def row_name(level: str, workers: int) -> str:
    """The name of the row of a level, each worker on a device of its own."""
    if level == BASELINE:
        return BASELINE
    if level == REPLICATED:
        return f"{level}, {quantity(workers, 'replica')}"
    return f"{level}, {workers} {'process' if workers == 1 else 'processes'}"
