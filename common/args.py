"""The flags of every level. A wrong flag or value is one line and a non-zero exit."""

import argparse
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from common.checkpoints.schedule import checkpoint_interval
from common.errors import fail
from common.flag_types import natural, number, positive, positive_float
from common.instruments.flags import add_instrument_flags
from common.levels import DISTRIBUTED, MESH, WITH_CHECKPOINTS, WITH_REPLICAS

PRECISIONS = ("no", "fp16", "bf16")


class _Parser(argparse.ArgumentParser):
    """The parser of one script: it takes the common flags and those of its level and script, and refuses the others."""

    def __init__(self, level: str, script: str, prog: str) -> None:
        super().__init__(prog=prog, allow_abbrev=False)
        self.level = level
        self.script = script

    def error(self, message: str) -> NoReturn:
        fail(message)

    def add_flag_of(self, owners: tuple[str, ...], option: str, otherwise: Any = None, **settings: Any) -> None:
        """Add a flag of some levels or scripts. The others refuse it, and have the setting `otherwise`."""
        if self.level in owners or self.script in owners:
            self.add_argument(option, **settings)
        else:
            self.add_argument(option, action=_Refusal, owners=owners, default=otherwise)


class _Refusal(argparse.Action):
    """A flag that belongs to other scripts."""

    def __init__(self, owners: tuple[str, ...], **settings: Any) -> None:
        super().__init__(nargs="?", help=argparse.SUPPRESS, **settings)
        self.owners = owners

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        fail(f"{option_string} belongs to {' and '.join(self.owners)}, not to {parser.script}")


def parse_args(script: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of the script at the path `script`.

    `args.level` is the level's name, `args.script` that of the script, such as 03_accelerate/train_full, `args.dtype` a
    torch.dtype. In the two train_full.py `args.checkpoint_every` is a CheckpointInterval, and without their flags
    precision and accumulation are None. Neither machine nor launcher is looked at: `common.settings` does that, and
    `common.start` refuses files that cannot be written.

    Raises UserError after one line on stderr.
    """
    path = Path(script).resolve()
    level = path.parent.name
    name = level if path.stem == "train" else f"{level}/{path.stem}"
    parser = _Parser(level, name, prog=f"{level}/{path.name}")
    _add_flags(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        fail(f"unknown argument {unknown[0]}; {parser.prog} --help lists the flags")
    if args.data == "device" and args.num_workers > 0:
        fail("argument --data: on the device there is nothing for loader workers to do; leave --num-workers out")
    args.level = level
    args.script = name
    args.dtype = getattr(torch, args.dtype)
    return args


def _add_flags(parser: _Parser) -> None:
    flag = parser.add_argument
    flag("--epochs", type=positive, default=1, metavar="N", help="passes over the training set")
    flag("--batch-size", type=positive, default=64, metavar="N", help="global batch: samples per optimizer step")
    flag("--lr", type=positive_float, default=1e-3, metavar="F", help="learning rate of AdamW")
    flag("--seed", type=_seed, default=42, metavar="N", help="weights, sample order, dropout")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto", help="auto: MNIST if it can be had")
    flag("--data-dir", default=os.environ.get("MNIST_ROOT", "data"), metavar="PATH", help="holds MNIST/raw")
    flag("--device", default="auto", help="auto, cpu or cuda; at levels 00 and 01 also cuda:N")
    flag("--num-workers", type=natural, default=0, metavar="N", help="loader workers per process")
    flag("--data", choices=["host", "device"], default="host", help="where the images wait for their turn")
    flag_of = parser.add_flag_of
    full_flag = partial(flag_of, WITH_CHECKPOINTS)
    flag_of(WITH_REPLICAS, "--replicas", type=positive, metavar="N", help="default: visible GPUs, at least 2")
    flag_of(DISTRIBUTED, "--timeout", type=_seconds, default="300", metavar="SECONDS", help="of a collective")
    flag_of(
        (MESH,), "--tensor", otherwise=1, type=positive, default=2, metavar="N", help="ranks per layer: 1, 2, 4 … 128"
    )
    full_flag("--mixed-precision", otherwise="no", choices=PRECISIONS, help="default: the launcher's, or no")
    full_flag(
        "--gradient-accumulation-steps",
        otherwise=1,
        type=positive,
        metavar="N",
        help="micro-batches per optimizer step (default: the launcher's, or 1)",
    )
    full_flag("--checkpoint-dir", type=_folder, metavar="PATH", help="save there, resume from the last")
    full_flag(
        "--checkpoint-every",
        type=checkpoint_interval,
        default="100",
        metavar="STEPS or SECONDSs",
        help="optimizer steps between checkpoints, or seconds: 60s",
    )
    add_instrument_flags(parser)


def _seed(text: str) -> int:
    # NumPy takes 32 bits, and a rank and an epoch are added.
    return number(text, int, "a whole number from 0 to 4000000000", 0, 4 * 10**9)


def _seconds(text: str) -> timedelta:
    # A backend's clock cannot count more.
    return timedelta(seconds=number(text, int, "a whole number from 1 to 1000000", 1, 10**6))


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must name a folder")
    return os.path.abspath(os.path.expanduser(text))
