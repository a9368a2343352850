"""The flags of every level. A wrong flag or value is one line and a non-zero exit."""

import argparse
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from common.checkpoint_schedule import checkpoint_interval
from common.errors import fail
from common.instruments.flags import add_instrument_flags
from common.levels import DISTRIBUTED, MESH, WITH_CHECKPOINTS
from common.numbers import natural, number, positive, positive_float

# The flags that not all scripts have. Each belongs to all scripts of a level, or to single scripts.
_OWNERS = {
    "--replicas": ("01_data_parallel",),
    "--timeout": DISTRIBUTED,
    "--tensor": (MESH,),
    "--mixed-precision": WITH_CHECKPOINTS,
    "--gradient-accumulation-steps": WITH_CHECKPOINTS,
    "--checkpoint-dir": WITH_CHECKPOINTS,
    "--checkpoint-every": WITH_CHECKPOINTS,
}
# The settings that are read also in a script that has no flag for them.
_WITHOUT_FLAG = {
    "replicas": None,
    "tensor": 1,
    "mixed_precision": "no",
    "gradient_accumulation_steps": 1,
    "checkpoint_dir": None,
}
PRECISIONS = ("no", "fp16", "bf16")
# A launcher sets these variables from its configuration file.
LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"
LAUNCHER_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_args(script: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of the script at the path `script`, checked against each other.

    `args.level` is the level's name, `args.script` that of the script, such as 03_accelerate/train_full, `args.dtype` a
    torch.dtype, `args.checkpoint_every` a CheckpointInterval. The machine is not looked at: `common.start` finds the
    device that `args.device` names, and refuses files that cannot be written.

    Raises:
        UserError: after one line on stderr.
    """
    path = Path(script).resolve()
    level = path.parent.name
    name = level if path.stem == "train" else f"{level}/{path.stem}"
    accumulation = os.environ.get(LAUNCHER_ACCUMULATION, "1")
    if name in WITH_CHECKPOINTS and not re.fullmatch("[1-9][0-9]*", accumulation):  # argparse would blame the flag.
        fail(f"{LAUNCHER_ACCUMULATION} is {accumulation!r}: it must be a whole number of at least 1")
    parser = _make_parser(level, name, prog=f"{level}/{path.name}")
    args, unknown = parser.parse_known_args(argv)
    _refuse_unknown_flags(parser, name, unknown)
    if args.mixed_precision not in PRECISIONS:  # argparse compares no default with `choices`.
        fail(f"{LAUNCHER_PRECISION} is {args.mixed_precision!r}: it must be no, fp16 or bf16")
    if args.data == "device" and args.num_workers > 0:
        fail("argument --data: on the device there is nothing for loader workers to do; leave --num-workers out")
    args.level = level
    args.script = name
    args.dtype = getattr(torch, args.dtype)
    return args


def _make_parser(level: str, name: str, prog: str) -> _Parser:
    parser = _Parser(prog=prog, allow_abbrev=False)
    parser.set_defaults(**_WITHOUT_FLAG)
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

    def own_flag(option: str, **settings: Any) -> None:
        if level in _OWNERS[option] or name in _OWNERS[option]:
            flag(option, **settings)

    own_flag("--replicas", type=positive, metavar="N", help="copies of the model (default: visible GPUs, at least 2)")
    own_flag("--timeout", type=_seconds, default="300", metavar="SECONDS", help="of a collective")
    own_flag("--tensor", type=positive, default=2, metavar="N", help="ranks that share a layer (a power of 2, to 128)")
    precision = os.environ.get(LAUNCHER_PRECISION, "no")
    own_flag("--mixed-precision", choices=PRECISIONS, default=precision, help="default: the launcher's, or no")
    own_flag(
        "--gradient-accumulation-steps",
        type=positive,
        default=os.environ.get(LAUNCHER_ACCUMULATION, "1"),
        metavar="N",
        help="micro-batches per optimizer step (default: the launcher's, or 1)",
    )
    own_flag("--checkpoint-dir", type=_folder, metavar="PATH", help="save there, and resume from the newest one in it")
    own_flag(
        "--checkpoint-every",
        type=checkpoint_interval,
        default="100",
        metavar="STEPS or SECONDSs",
        help="optimizer steps between checkpoints, or seconds: 60s",
    )
    add_instrument_flags(parser)
    return parser


def _refuse_unknown_flags(parser: _Parser, name: str, unknown: list[str]) -> None:
    if unknown:
        word = unknown[0]
        flag = word.partition("=")[0]
        if flag in _OWNERS:
            fail(f"{flag} belongs to {' and '.join(_OWNERS[flag])}, not to {name}")
        fail(f"unknown argument {word}; {parser.prog} --help lists the flags")


def _seed(text: str) -> int:
    # NumPy takes 32 bits, and a rank and an epoch are added.
    return number(text, int, "a whole number from 0 to 4000000000", 0, 4 * 10**9)


def _seconds(text: str) -> timedelta:
    # A backend's clock cannot count more.
    return timedelta(seconds=number(text, int, "a whole number from 1 to 1000000", 1, 10**6))


def _folder(text: str) -> str:
    """The absolute path of a folder, whose name may begin with `~`."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder")
    return os.path.abspath(os.path.expanduser(text))
