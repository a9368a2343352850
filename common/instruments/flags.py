"""Flags for comparing, for measuring and for files with what comes out. A training runs without them."""

import argparse
from pathlib import Path

from common.flag_types import natural, positive


def add_instrument_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("for comparing, for measuring and for files")
    flag = group.add_argument
    flag("--max-steps", type=positive, metavar="N", help="train for one epoch, on the first N × batch-size samples")
    flag("--train-samples", type=positive, metavar="N", help="train on the first N samples only")
    flag("--eval-samples", type=positive, metavar="N", help="evaluate on the first N samples only")
    flag("--no-dropout", action="store_true", help="no random numbers but those of the weights and the order")
    flag("--dtype", choices=["float32", "float64"], default="float32", help="the type of the weights and images")
    flag("--warm-up-steps", type=natural, default=10, metavar="N", help="steps before images/s are measured")
    flag("--save", type=Path, metavar="PATH", help="write the final weights there, as a state dict")
    flag("--json", type=Path, metavar="PATH", help="write the result there, as JSON")
    flag(
        "--cores-per-device",
        type=positive,
        metavar="N",
        help="on a CPU: each process or replica has N threads on N cores of its own (default: they share all cores)",
    )
    flag(
        "--allocator",
        choices=["keep", "system"],
        default="keep",
        help="keep: the C library keeps large blocks of the CPU's memory from step to step; system: it is left alone",
    )
