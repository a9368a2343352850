"""Flags that several questions have, and the end of every answer."""

import argparse
import json
import re
from pathlib import Path

from benchmarks.your_network import spec, training
from benchmarks.your_network.spec import UserNetwork
from common.errors import fail
from common.files import write_atomically


def add_network(parser: argparse.ArgumentParser) -> None:
    """SPEC, and what is not written in it."""
    flag = parser.add_argument
    flag("spec", metavar="SPEC", help="torchvision:NAME or FILE.py:FUNCTION")
    flag("--input", type=_shape, metavar="CxHxW", help="shape of a sample (3x224x224); not where the file has batch")
    flag("--optimizer", choices=spec.OPTIMIZERS, default="adamw", help="unless the file has its own (adamw)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the answer there")


def network(options: argparse.Namespace) -> UserNetwork:
    """The network that the flags of `add_network` name.

    Raises:
        UserError: where there is no such network.
        StepFailed: where its batches have not as many samples as they are asked for.
    """
    found = spec.load(options.spec, options.input, options.optimizer)
    if found.has_own_batch:
        training.check_batches(found)
    return found


def print_assumption(network: UserNetwork) -> None:
    if network.assumed:
        print(f"{network.assumed}.")


def positive(text: str) -> int:
    """The type of a flag that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with x between them, as in 3x224x224, not {text!r}")
    return tuple(int(number) for number in text.split("x"))


def conclude(options: argparse.Namespace, verdict: list[str], record: dict) -> None:
    """Print the verdict, and write the whole answer as JSON if that was asked for."""
    print()
    print(*verdict, sep="\n")
    if options.json:
        asked = {"spec": options.spec, "question": options.question}
        text = json.dumps({**asked, **record, "verdict": verdict}, indent=1)
        try:
            write_atomically(options.json, text + "\n")
        except OSError as error:
            fail(f"--json: {error}")
