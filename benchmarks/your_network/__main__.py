"""Questions about a network of your own, and about a training script.

    python -m benchmarks.your_network memory torchvision:resnet50 --batch 64 --devices 1 2 4 8
    python -m benchmarks.your_network memory my_file.py:build --precision bf16 --checkpointing
    python -m benchmarks.your_network predict torchvision:resnet50 --gpu h100 --inner nvlink-h100 --network 8x400g
    python -m benchmarks.your_network measure torchvision:resnet18 --input 3x64x64 --batch 32 --devices 1 2
    python -m benchmarks.your_network doctor --processes 2 my_train.py --epochs 2

What my_file.py may hold beside `build` is said in benchmarks/your_network/spec.py.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.your_network import measure, memory, predict
from benchmarks.your_network.doctor import command as doctor
from benchmarks.your_network.flags import add_json, positive
from benchmarks.your_network.training import StepFailed, TooLarge
from common.errors import fail


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.your_network", description=__doc__.splitlines()[0])
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name, question in (("memory", memory), ("predict", predict), ("measure", measure)):
        of_question = questions.add_parser(name, help=question.HELP)
        question.add_flags(of_question)
        of_question.set_defaults(answer=question.answer)
    _add_doctor(questions)
    return parser.parse_args(argv)


def _add_doctor(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("doctor", help="which mistakes of common/pitfalls a training script makes")
    flag = parser.add_argument
    flag("--processes", type=_several, default=2, metavar="N", help="to start the script on (2)")
    flag("--steps", type=positive, metavar="N", help="optimizer steps after which to end it (none: its own end)")
    flag("--time-out", type=positive, default=120, metavar="S", help="seconds in which a rank must get on (120)")
    add_json(parser)
    flag("script", type=Path, metavar="SCRIPT", help="a program that torchrun could start")
    flag("arguments", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script")
    parser.set_defaults(answer=doctor.answer_doctor)


def _several(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: the doctor compares ranks")
    return int(text)


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    answer: Callable[[argparse.Namespace], None] = options.answer
    try:
        answer(options)
    except TooLarge as error:
        fail(f"{error}; give a smaller --batch")
    except StepFailed as error:
        fail(str(error))


if __name__ == "__main__":
    main()
