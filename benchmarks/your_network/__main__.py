"""Questions about a network of your own.

    python -m benchmarks.your_network memory torchvision:resnet50 --batch 64 --devices 1 2 4 8
    python -m benchmarks.your_network memory my_file.py:build --precision bf16 --checkpointing
    python -m benchmarks.your_network doctor --processes 2 my_train.py --epochs 2

What my_file.py may hold beside `build` is said in benchmarks/your_network/spec.py.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from benchmarks.your_network import memory, spec, strategies
from benchmarks.your_network.doctor import command as doctor
from common.errors import fail
from common.files import write_atomically


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.your_network", description=lines[0])
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    _add_memory(questions)
    _add_doctor(questions)
    return parser.parse_args(argv)


def _add_memory(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("memory", help="what each strategy needs on each device, and which batch fits")
    flag = parser.add_argument
    flag("spec", metavar="SPEC", help="torchvision:NAME or FILE.py:FUNCTION")
    flag("--input", type=_shape, default=spec.IMAGE, metavar="CxHxW", help="shape of a sample (3x224x224)")
    flag("--batch", type=_positive, default=64, metavar="N", help="global batch (64)")
    flag("--devices", type=_positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="how many (1 2 4 8)")
    flag("--optimizer", choices=spec.OPTIMIZERS, default="adamw", help="unless the file has its own (adamw)")
    flag("--precision", choices=memory.PRECISIONS, default="no", help="of mixed precision (no)")
    flag("--checkpointing", action="store_true", help="activation checkpointing of each block")
    flag(
        "--gib", type=_positive, nargs="+", default=memory.SIZES, metavar="N", help="memory of a device (8 16 24 40 80)"
    )
    flag("--json", type=Path, metavar="PATH", help="also write the answer there")
    parser.set_defaults(answer=answer_memory)


def _add_doctor(questions: argparse._SubParsersAction) -> None:
    parser = questions.add_parser("doctor", help="which mistakes of common/pitfalls a training script makes")
    flag = parser.add_argument
    flag("--processes", type=_several, default=2, metavar="N", help="to start the script on (2)")
    flag("--steps", type=_positive, metavar="N", help="optimizer steps after which to end it (none: its own end)")
    flag("--time-out", type=_positive, default=120, metavar="S", help="seconds in which a rank must get on (120)")
    flag("--json", type=Path, metavar="PATH", help="also write the answer there")
    flag("script", type=Path, metavar="SCRIPT", help="a program that torchrun could start")
    flag("arguments", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script")
    parser.set_defaults(answer=doctor.answer_doctor)


def _several(text: str) -> int:
    if _positive(text) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: the doctor compares ranks")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with x between them, as in 3x224x224, not {text!r}")
    return tuple(int(number) for number in text.split("x"))


def answer_memory(options: argparse.Namespace) -> None:
    for devices in options.devices:
        if options.batch % devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {devices} devices")
    network = spec.load(options.spec, options.input, options.optimizer)
    counts = sorted(set(options.devices))
    total = sum(len(strategies.on(devices)) for devices in counts)
    with tqdm(total=total, leave=False, disable=None) as bar:
        setting = (options.precision, options.checkpointing, sorted(set(options.gib)))
        found = list(memory.rows(network, options.batch, counts, *setting, bar))
    print(f"{network.title}, global batch {options.batch}, mixed precision: {options.precision}\n")
    print(memory.table(found))
    _conclude(options, memory.verdict(found), {"memory": found})


def _conclude(options: argparse.Namespace, verdict: list[str], record: dict) -> None:
    print()
    print(*verdict, sep="\n")
    if options.json:
        asked = {"spec": options.spec, "question": options.question}
        text = json.dumps({**asked, **record, "verdict": verdict}, indent=1)
        write_atomically(options.json, text + "\n")


def main(argv: list[str] | None = None) -> None:
    options = parse_options(argv)
    answer: Callable[[argparse.Namespace], None] = options.answer
    answer(options)


if __name__ == "__main__":
    main()
