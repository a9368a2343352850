"""The end of every answer about a network."""

import argparse
import json

from common.errors import fail
from common.files import write_atomically


def conclude(options: argparse.Namespace, facts: list[str], record: dict) -> None:
    """Print three lines of facts, and write the whole answer as JSON if that was asked for."""
    print()
    print(*facts, sep="\n")
    if options.json:
        asked = {"spec": options.spec, "question": options.question}
        write(options.json, "--json", json.dumps({**asked, **record, "facts": facts}, indent=1) + "\n")


def milliseconds(seconds: float) -> str:
    """The number of milliseconds, with three digits or more."""
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(path, flag: str, text: str) -> None:
    """Write a file that a flag asks for. Raises UserError if that cannot be done."""
    try:
        write_atomically(path, text)
    except OSError as error:
        fail(f"{flag}: {error}")
