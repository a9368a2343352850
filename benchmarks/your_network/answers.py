"""The end of every answer about a network."""

import argparse
import json

from common.errors import fail
from common.files import write_atomically


def write_json(options: argparse.Namespace, answer: dict) -> None:
    """Write the whole answer as JSON if that was asked for. Raises UserError if that cannot be done."""
    if options.json:
        asked = {"spec": options.spec, "question": options.question, "batch": options.batch}
        try:
            write_atomically(options.json, json.dumps(asked | answer, indent=1) + "\n")
        except OSError as error:
            fail(f"--json: {error}")


def milliseconds(seconds: float) -> str:
    """The number of milliseconds, with three digits or more."""
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
