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

from benchmarks.your_network import measure, memory, predict
from benchmarks.your_network.errors import StepFailed
from common.errors import fail

QUESTIONS = {
    "memory": (memory, "what each strategy needs on a device, and which batch fits"),
    "predict": (predict, "how fast a step would be on 1 to 512 GPUs"),
    "measure": (measure, "how long a step takes on this machine, in parallel too"),
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.your_network", description=__doc__.splitlines()[0])
    questions = parser.add_subparsers(required=True, metavar="QUESTION")
    for name, (module, about) in QUESTIONS.items():
        question = questions.add_parser(name, help=about)
        module.add_flags(question)
        flag = question.add_argument
        flag("spec", metavar="SPEC", help="torchvision:NAME or FILE.py:FUNCTION")
        flag("--input", type=shape, metavar="CxHxW", help="shape of a sample (3x224x224); not where the file has batch")
        question.set_defaults(answer=module.answer)
    return parser.parse_args(argv)


def shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with x between them, as in 3x224x224, not {text!r}")
    return tuple(int(number) for number in text.split("x"))


def main(argv: list[str] | None = None) -> Any:
    """Print the answer to a question, and return its numbers."""
    options = parse_options(argv)
    try:
        return options.answer(options)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except StepFailed as error:
        fail(str(error))


if __name__ == "__main__":
    main()
