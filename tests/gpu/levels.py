"""A rung of the ladder on one rank of the imitated machine."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from common import ladder
from common.args import parse_args
from common.data import loading
from common.data.synthetic import draw_cache, read_synthetic
from common.machine import fit_to_machine
from tests.gpu.machine import GPUS, Machine, imitated_rank

BATCH = 16
STEPS = 15  # more than the warm-up
FLAGS = ["--dataset", "synthetic", "--batch-size", str(BATCH), "--train-samples", str(STEPS * BATCH)]


def train_on_rank(
    rung: str,
    rank: int,
    world_size: int = GPUS,
    flags: tuple[str, ...] = (),
    path: Path | None = None,
    eval_samples: int = 2 * BATCH,
    change: Callable[[Any], Any] = lambda module: contextlib.nullcontext(),
    **options: Any,
) -> Machine:
    """Train a rung, from its first line to its last, on the imitated rank; returns what the machine saw.

    Args:
        path: of another version of the rung.
        change: a context in which to train, made from the rung's module.
    """
    module = ladder.load(rung, path)
    argv = [*FLAGS, "--eval-samples", str(eval_samples), *flags]
    draw_cache()
    sets = read_synthetic()  # before the imitation begins, in which no tensor has values
    with (
        mock.patch.object(loading, "read_synthetic", lambda: sets),
        change(module),
        imitated_rank(rank, world_size, **options) as machine,
    ):
        args = fit_to_machine(parse_args(module.__file__, [*argv, "--device", "cuda"]))
        machine.result = module.train(args)
    return machine
