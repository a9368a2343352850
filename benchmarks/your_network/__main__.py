"""Questions about a network of your own.

    python -m benchmarks.your_network memory torchvision:resnet50 --batch 64 --devices 1 2 4 8
    python -m benchmarks.your_network memory my_file.py:build --precision bf16 --checkpointing
    python -m benchmarks.your_network predict torchvision:resnet50 --gpu h100 --network 8x400g
    python -m benchmarks.your_network measure torchvision:resnet18 --input 3x64x64 --batch 32 --devices 1 2

benchmarks/your_network/spec.py says which functions my_file.py may have beside `build`.
"""

import argparse
import re
import sys
from typing import Any

from benchmarks.harness.paired import FEWEST_ROUNDS
from benchmarks.your_network import measure, memory, predict, presets
from benchmarks.your_network.errors import StepFailed
from common.errors import fail
from common.flag_types import positive, positive_float

ANSWERS = {"memory": memory.answer, "predict": predict.answer, "measure": measure.answer}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.your_network", description=__doc__.splitlines()[0])
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    add_memory_flags(questions.add_parser("memory", help="what each strategy needs on a device, and which batch fits"))
    add_predict_flags(questions.add_parser("predict", help="how fast a step would be on 1 to 512 GPUs"))
    add_measure_flags(questions.add_parser("measure", help="how long a step takes on this machine, in parallel too"))
    for question in questions.choices.values():
        flag = question.add_argument
        flag("spec", metavar="SPEC", help="torchvision:NAME or FILE.py:FUNCTION")
        flag("--input", type=shape, metavar="CxHxW", help="shape of a sample (3x224x224); not where the file has batch")
    return parser.parse_args(argv)


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    add_global_batch(parser)
    flag("--devices", type=positive, nargs="+", default=[1, 8], metavar="N", help="how many (1 8)")
    flag("--precision", choices=memory.PRECISIONS, default="no", help="of mixed precision (no)")
    flag("--checkpointing", action="store_true", help="activation checkpointing of each block")
    flag("--gib", type=positive, default=24, metavar="N", help="memory of a device, for the largest batch (24)")


def add_predict_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--batch-per-gpu", type=positive, default=64, metavar="N", help="samples of a step on each GPU (64)")
    flag("--gpu", choices=presets.GPUS, default="a100", help="kind of GPU (a100)")
    flag("--inner", choices=presets.INNER, default="nvlink", help="links between a node's GPUs (nvlink)")
    flag("--network", choices=presets.NETWORK, default="8x200g", help="network cards of a node (8x200g)")
    flag("--gpus-per-node", type=int, choices=(1, 2, 4, 8), default=8, metavar="N", help="1, 2, 4 or 8 (8)")
    measured_step = "milliseconds of a step of --batch-per-gpu samples on one GPU, if you measured it"
    flag("--measured-ms", type=positive_float, metavar="T", help=measured_step)


def add_measure_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    add_global_batch(parser)
    flag("--devices", type=positive, nargs="+", metavar="N", help="how many (1 2; 1 on one GPU)")
    flag("--rounds", type=positive, default=FEWEST_ROUNDS, metavar="R", help="turns that each takes (%(default)s)")


def add_global_batch(parser: argparse.ArgumentParser) -> None:
    about = "global batch: samples of a step on all devices together (64)"
    parser.add_argument("--batch", type=positive, default=64, metavar="N", help=about)


def shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with x between them, as in 3x224x224, not {text!r}")
    return tuple(int(number) for number in text.split("x"))


def main(argv: list[str] | None = None) -> Any:
    """Print the answer to a question, and return its numbers."""
    options = parse_options(argv)
    try:
        return ANSWERS[options.question](options)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except StepFailed as error:
        fail(str(error))


if __name__ == "__main__":
    main()
