"""What every program that draws from a record takes: the record, and the folder for what is drawn."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple


class Recorded(NamedTuple):
    """A record that was read, its own path, and the folder for what is drawn from it, which is there."""

    content: dict
    path: Path
    folder: Path


def read_record(module: str, description: str, what: str, source: str, argv: list[str] | None = None) -> Recorded:
    """Read the record that the command line names. Where there is none, the program ends with one line.

    Args:
        module: the program, as `python -m` takes it.
        description: its first line.
        what: what is recorded, for the error, such as "record of the network".
        source: what writes such a record, for `--help`.
        argv: by default the program's own.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("record", type=Path, help=source)
    parser.add_argument("--out", type=Path, metavar="PATH", help="folder for what is drawn, by default that of RECORD")
    options = parser.parse_args(argv)
    try:
        content = json.loads(options.record.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"no {what} in {options.record}: {error}")
    folder = options.out or options.record.parent
    folder.mkdir(parents=True, exist_ok=True)
    return Recorded(content, options.record, folder)
