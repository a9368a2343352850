"""`config`: ask a few questions and write the launcher's configuration file; `default` and `update` ask none."""

import argparse
from pathlib import Path

from ..utils import CustomArgumentParser, command_parser
from .cluster import get_cluster_input
from .config_args import default_config_path


def config_command_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `config` itself; `get_config_parser` adds its subcommands."""
    parser = command_parser("config", subparsers, __doc__)
    parser.add_argument("--config_file", help="where to write; by default where the launcher looks")
    parser.set_defaults(func=config_command)
    return parser


def config_command(args: argparse.Namespace) -> int:
    """Ask, write the file, and return the exit code."""
    path = Path(args.config_file or default_config_path())
    config = get_cluster_input()
    config.write(path)
    print(f"configuration saved at {path}")
    return 0
