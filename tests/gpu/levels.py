"""A rung of the ladder on one rank of the imitated machine."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common import ladder
from common.args import parse_args
from common.data import load_data
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
    # Files are read before the imitation begins, in which no tensor has values.
    data = load_data(parse_args(str(ladder.script("00_single_gpu")), [*argv[: len(FLAGS) + 2], "--device", "cpu"]))

    def loaded(args: Any) -> Any:
        if args.data == "device":
            for part in data:
                part.move_to(torch.device("cuda", torch.cuda.current_device()))
        return data

    with (
        mock.patch.object(module, "load_data", loaded),
        change(module),
        imitated_rank(rank, world_size, **options) as machine,
    ):
        args = parse_args(module.__file__, [*argv, "--device", "cuda"])
        machine.result = module.train(args)
    return machine
