"""The flags of every level, and their checks: a wrong flag or value is one line and a non-zero exit."""

import argparse
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from common.errors import fail

_ONE_PROCESS = ("00_single_gpu", "01_data_parallel")
_ACCELERATED = ("03_accelerate", "04_trainer")
_DISTRIBUTED = ("02_ddp_raw", *_ACCELERATED)
_OWN_FLAGS = {
    "--replicas": ("01_data_parallel",),
    "--timeout": _DISTRIBUTED,
    "--mixed-precision": _ACCELERATED,
    "--gradient-accumulation-steps": _ACCELERATED,
    "--checkpoint-dir": _ACCELERATED,
    "--checkpoint-every": _ACCELERATED,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_args(script: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of the level whose train.py is `script`, checked against each other and against this machine.

    `args.level` is the level's name, `args.device` a torch.device, `args.dtype` a torch.dtype. Raises UserError,
    after one line on stderr.
    """
    level = Path(script).resolve().parent.name
    parser = _Parser(prog=f"{level}/train.py", allow_abbrev=False)
    flag = parser.add_argument
    flag("--epochs", type=_positive, default=1, metavar="N", help="passes over the training set")
    flag("--batch-size", type=_positive, default=64, metavar="N", help="global batch: samples per optimizer step")
    flag("--lr", type=_positive_float, default=1e-3, metavar="F", help="learning rate of AdamW")
    flag("--seed", type=_seed, default=42, metavar="N", help="weights, sample order, dropout")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto", help="auto: MNIST if it can be had")
    flag("--data-dir", default=os.environ.get("MNIST_ROOT", "data"), metavar="PATH", help="holds MNIST/raw")
    flag("--device", default="auto", help="auto, cpu, cuda, …")
    flag("--num-workers", type=_natural, default=0, metavar="N", help="loader workers per process")
    flag("--max-steps", type=_positive, metavar="N", help="stop after N optimizer steps, then evaluate")
    flag("--no-dropout", action="store_true", help="for comparing levels")
    flag("--dtype", choices=["float32", "float64"], default="float32", help="float64 for comparing levels")
    flag("--train-samples", type=_positive, metavar="N", help="only the first N of them, for comparing levels")
    flag("--eval-samples", type=_positive, metavar="N", help="only the first N of them, for comparing levels")
    flag("--save", type=_writable, metavar="PATH", help="final weights, a state dict")
    flag("--json", type=_writable, metavar="PATH", help="the result")
    if level in _OWN_FLAGS["--replicas"]:
        flag("--replicas", type=_positive, metavar="N", help="copies of the model (default: visible GPUs, at least 2)")
    if level in _DISTRIBUTED:
        flag("--timeout", type=_seconds, default="300", metavar="SECONDS", help="of a collective")
    if level in _ACCELERATED:
        # A launcher's configuration file arrives as environment variables.
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
        flag("--mixed-precision", choices=["no", "fp16", "bf16"], default=precision)
        flag("--gradient-accumulation-steps", type=_positive, default=steps, metavar="N", help="micro-batches per step")
        flag(
            "--checkpoint-dir",
            type=_folder,
            metavar="PATH",
            help="save there, and resume from the newest checkpoint in it",
        )
        flag("--checkpoint-every", type=_positive, default=100, metavar="STEPS")
    args, unknown = parser.parse_known_args(argv)
    for name, value in vars(args).items():
        if value == []:  # what argparse makes of --name=--
            parser.error(f"argument --{name.replace('_', '-')}: expected one argument")
    for word in unknown:
        name = word.partition("=")[0]
        if name in _OWN_FLAGS:
            parser.error(f"{name} belongs to level {' and '.join(_OWN_FLAGS[name])}, not to {level}")
        parser.error(f"unknown argument {word}; {parser.prog} --help lists the flags")
    args.level = level
    args.dtype = getattr(torch, args.dtype)
    args.device = _device(args.device)
    if level in _OWN_FLAGS["--replicas"]:
        args.replicas = _replicas(args)
    _check_world(args)
    on_cpu = args.device.type == "cpu"
    if on_cpu and getattr(args, "mixed_precision", "no") == "fp16" and os.environ.get("RANK", "0") == "0":
        slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's; bf16 is not"
        print(f"warning: {slow}", file=sys.stderr, flush=True)
    return args


def _number(text: str, kind: type, least: float, description: str, most: float = sys.float_info.max):
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most):
        raise argparse.ArgumentTypeError(f"must be {description}, not {text!r}")
    return value


def _positive(text: str) -> int:
    return _number(text, int, 1, "a whole number of at least 1")


def _natural(text: str) -> int:
    return _number(text, int, 0, "a whole number of at least 0")


def _seed(text: str) -> int:
    # NumPy takes 32 bits, and a rank and an epoch are added.
    return _number(text, int, 0, "a whole number from 0 to 4000000000", 4 * 10**9)


def _seconds(text: str) -> timedelta:
    # What lies above is more than a backend's clock can count.
    return timedelta(seconds=_number(text, int, 1, "a whole number from 1 to 1000000", 10**6))


def _positive_float(text: str) -> float:
    return _number(text, float, math.ulp(0.0), "a number above 0")


def _writable(text: str) -> Path:
    """A path in a folder that can be written to: better to learn that before the training than after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: it must be a file in a folder that exists")
    return path


def _folder(text: str) -> str:
    """One absolute path, whoever looks for the folder, and from where."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder")
    return os.path.abspath(os.path.expanduser(text))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        fail(f"argument --device: {name!r} cannot be used here ({str(error).splitlines()[0]}); try --device cpu")
    return device


def _replicas(args) -> int:
    gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
    if args.replicas is None:
        return max(2, gpus)
    if 2 <= gpus < args.replicas:
        fail(f"argument --replicas: {args.replicas} replicas need as many GPUs, {gpus} are visible")
    return args.replicas


def _check_world(args) -> None:
    """Refuse an environment that is half set, and a global batch that the processes cannot share evenly."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
    if given and missing:
        fail(f"{', '.join(given)} is set but {', '.join(missing)} is not: start the ranks with torchrun, or set all")
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number, total = os.environ.get(name, "0"), os.environ.get(of, "1")
        if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
            fail(f"{name}={number} does not fit {of}={total}: ranks are numbered from 0")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.level in _ONE_PROCESS:
        if world_size > 1:
            fail(f"{args.level} is one process, but WORLD_SIZE is {world_size}: start it with python, not torchrun")
        return
    parts = world_size * getattr(args, "gradient_accumulation_steps", 1)
    if args.batch_size % parts:
        below = args.batch_size // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        micro = f" × {parts // world_size} accumulation steps" if parts > world_size else ""
        processes = f"{world_size} process{'es' if world_size > 1 else ''}"
        fail(f"--batch-size {args.batch_size} does not divide by {parts} ({processes}{micro}): use {nearest}")
