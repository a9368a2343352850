"""The entry point of the command line: one parser, four commands, and one line for each error."""

import sys
from collections.abc import Sequence

from .config import get_config_parser
from .config.config_args import ConfigError
from .env import env_command_parser
from .launch import launch_command_parser
from .test import test_command_parser
from .utils import CustomArgumentParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a request that cannot be met, with one line on stderr."""
    parser = CustomArgumentParser("python -m common.accelerator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="launch|config|test|env")
    launch_command_parser(commands)
    get_config_parser(commands)
    test_command_parser(commands)
    env_command_parser(commands)
    args = parser.parse_args(argv)
    try:
        return args.func(args)
    except ConfigError as error:
        print(f"{args.parser.prog}: {error}", file=sys.stderr)
        return 2
