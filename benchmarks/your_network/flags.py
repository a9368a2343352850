"""The flags of every question. Nothing here imports torch, which takes seconds, so `--help` answers at once."""

import argparse
import re
from pathlib import Path

from benchmarks.harness.paired import FEWEST_ROUNDS
from benchmarks.predict import presets

OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("no", "bf16", "fp16")
SIZES = (8, 16, 24, 40, 80)  # GiB of memory that GPUs have, for the largest batches
LEVELS = ("00", "01", "02", "03", "04")
GLOBAL_BATCH = "global batch: samples of a step on ALL devices together (64)"


def add_memory(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("memory", help="what each strategy needs on each device, and which batch fits")
    _add_network(parser)
    flag = parser.add_argument
    flag("--batch", type=positive, default=64, metavar="N", help=GLOBAL_BATCH)
    flag("--devices", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="how many (1 2 4 8)")
    flag("--precision", choices=PRECISIONS, default="no", help="of mixed precision (no)")
    flag("--checkpointing", action="store_true", help="activation checkpointing of each block")
    flag("--gib", type=positive, nargs="+", default=SIZES, metavar="N", help="memory of a device (8 16 24 40 80)")
    _add_json(parser)


def add_predict(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("predict", help="how fast a step would be on 1 to 512 GPUs")
    _add_network(parser)
    flag = parser.add_argument
    usual = presets.Hardware()
    of_one_gpu = "samples of a step on EACH GPU, so N times as many in all on N GPUs (64)"
    flag("--batch", type=positive, default=64, metavar="N", help=of_one_gpu)
    flag("--gpu", choices=presets.GPUS, default=usual.gpu, help="kind of GPU (%(default)s)")
    flag("--inner", choices=presets.INNER, default=usual.inner, help="links between a node's GPUs (%(default)s)")
    flag("--network", choices=presets.NETWORK, default=usual.network, help="network cards of a node (%(default)s)")
    sizes = {"choices": presets.NODE_SIZES, "default": usual.gpus_per_node}
    flag("--gpus-per-node", type=int, **sizes, metavar="N", help="1, 2, 4 or 8 (%(default)s)")
    of_a_step = "a step of --batch samples on one GPU, if you measured it"
    flag("--measured-ms", type=_above_zero, metavar="T", help=of_a_step)
    flag("--page", type=Path, metavar="PATH", help="write a page with sliders too, which starts with these flags")
    _add_json(parser)


def add_measure(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("measure", help="how long a step takes at each level on this machine")
    _add_network(parser)
    flag = parser.add_argument
    flag("--batch", type=positive, default=64, metavar="N", help=GLOBAL_BATCH)
    flag("--devices", type=positive, nargs="+", default=[1, 2], metavar="N", help="how many (1 2)")
    flag("--level", choices=LEVELS, nargs="+", default=list(LEVELS), metavar="LEVEL", help="00 01 02 03 04 (all)")
    flag("--rounds", type=positive, default=FEWEST_ROUNDS, metavar="R", help="turns that each takes (%(default)s)")
    flag("--minutes", type=positive, default=10, metavar="M", help="that it may take (%(default)s)")
    flag("--cores-per-device", type=positive, metavar="N", help="without GPUs (an equal part of the cores)")
    _add_json(parser)


def add_doctor(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("doctor", help="which mistakes of common/pitfalls a training script makes")
    flag = parser.add_argument
    flag("--processes", type=_several, default=2, metavar="N", help="to start the script on (2)")
    flag("--steps", type=positive, metavar="N", help="optimizer steps after which to end it (none: its own end)")
    flag("--time-out", type=positive, default=120, metavar="S", help="seconds in which a rank must get on (120)")
    _add_json(parser)
    flag("script", type=Path, metavar="SCRIPT", help="a program that torchrun could start")
    flag("arguments", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script")


def _add_network(parser: argparse.ArgumentParser) -> None:
    """SPEC, and what is not written in it."""
    flag = parser.add_argument
    flag("spec", metavar="SPEC", help="torchvision:NAME or FILE.py:FUNCTION")
    flag("--input", type=_shape, metavar="CxHxW", help="shape of a sample (3x224x224); not where the file has batch")
    flag("--optimizer", choices=OPTIMIZERS, default="adamw", help="unless the file has its own (adamw)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the answer there")


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _several(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: the doctor compares ranks")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with x between them, as in 3x224x224, not {text!r}")
    return tuple(int(number) for number in text.split("x"))
