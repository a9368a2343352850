"""`config update`: write a configuration file anew, with today's keys and defaults; its settings stay."""

import argparse
from pathlib import Path

from ..utils import CustomArgumentParser, command_parser
from .config_args import default_config_path, load_config_from_file


def update_command_parser(
    parser: argparse._SubParsersAction | None = None, parents: list[argparse.ArgumentParser] | None = None
) -> CustomArgumentParser:
    """The parser of `config update`, as one of the subcommands of `parser`; `parents` are not needed here."""
    command = command_parser("update", parser, __doc__)
    command.add_argument("--config_file", help="the file to update; by default the one where the launcher looks")
    command.set_defaults(func=update_config_command)
    return command


def update_config_command(args: argparse.Namespace) -> int:
    """Update the file and return the exit code."""
    path = update_config(args)
    print(f"configuration at {path} updated")
    return 0


def update_config(args: argparse.Namespace) -> Path:
    """Read `args.config_file`, or the default file, write it back with every default spelt out, and return its path.

    A file that holds an error is left as it is.

    Raises:
        ConfigError: for a file that is missing, that the launcher would refuse, or that cannot be written.
    """
    path = Path(args.config_file or default_config_path())
    config = load_config_from_file(path)
    config.write(path)
    return path
