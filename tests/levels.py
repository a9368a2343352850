"""Levels, run in this process or on reused ranks. `tests/jobs.py` starts levels as scripts."""

import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common import ladder
from common.args import parse_args
from common.processes import ranks
from common.settings import fit_to_machine
from common.start import prepare_process

# An epoch is two steps and a tail that is dropped: 31 = 2 × 12 + 7. 12 divides by 1, 2, 3 and 4 processes. The second
# batch of an evaluation is a single sample, too few for several processes.
SAMPLES = 31
BATCH = 12
SHORT = ["--dataset", "synthetic", "--train-samples", "31", "--batch-size", "12", "--eval-samples", "13"]
EXACT = [*SHORT, "--epochs", "2", "--dtype", "float64", "--no-dropout"]
FULL = ladder.WITH_CHECKPOINTS[0]
# The launcher's variables with which levels 03 and 04 share out the model.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "1000",
}


def code_lines(name: str) -> list[str]:
    return [line for line in ladder.lines_below_docstring(name) if line.strip()]


class Training(NamedTuple):
    """The result of a training, and the final weights: on rank 0 only, elsewhere an empty dict."""

    result: dict
    weights: dict


def run_level(level: str, argv: list[str], path: Path | None = None) -> Training:
    """Train in this process.

    `path` is of another version of the level, in a folder of the level's name.
    """
    return run_module(ladder.load(level, path), argv)


def run_module(level: ModuleType, argv: list[str]) -> Training:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "weights.pt"
        args = parse_args(level.__file__, [*argv, "--save", str(saved)])
        # Other trainings run in this process too, so its threads and signals stay unless a test asks for cores.
        prepare = prepare_process if args.cores_per_device else fit_to_machine
        result = level.train(prepare(args))
        weights = {}
        if saved.exists():
            weights = torch.load(saved, weights_only=True)
        return Training(result, weights)


def run_on_ranks(
    level: str, world_size: int, argv: list[str], path: Path | None = None, environment: dict[str, str] | None = None
) -> tuple[list[dict], dict]:
    """`run_level` on `world_size` processes. Returns every rank's result, and the final weights."""
    outcomes = ranks(world_size).run(run_level, level, argv, path, environment=environment)
    return [outcome.result for outcome in outcomes], outcomes[0].weights


def in_own_folder(folders: list[Path], job: Callable, *arguments) -> Any:
    """Call a job in the folder of this rank, as on several machines without a shared disk."""
    with contextlib.chdir(folders[int(os.environ["RANK"])]):
        return job(*arguments)


@cache
def level_00() -> Training:
    """Level 00's exact training, with which those of other levels are compared."""
    return run_level("00_single_gpu", EXACT)


def changed_script(level: str, folder: Path, old: str, new: str) -> Path:
    """The level's script with `new` wherever it has `old`, in a folder of the level's name."""
    source = ladder.script(level).read_text()
    assert old in source, old
    path = folder / ladder.level_of(level) / ladder.script(level).name
    path.parent.mkdir(parents=True)
    path.write_text(source.replace(old, new))
    return path


@contextlib.contextmanager
def signal_before_step(step: int, number: signal.Signals) -> Iterator[None]:
    """This process gets the signal where its optimizer is about to make this step."""
    steps = itertools.count(1)

    def strike(*_) -> None:
        if next(steps) == step:
            signal.raise_signal(number)

    hook = register_optimizer_step_pre_hook(strike)
    try:
        yield
    finally:
        hook.remove()


def train_until_killed(step: int, level: str, argv: list[str], path: Path | None = None) -> None:
    with signal_before_step(step, signal.SIGKILL):
        run_level(level, argv, path)
