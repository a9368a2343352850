"""The launcher's configuration file: `config_args` reads it, `cluster` asks for it, `default` asks nothing."""

import argparse
from pathlib import Path

from ..utils import CustomArgumentParser, command_parser
from .cluster import get_cluster_input
from .config_args import default_config_path
from .default import default_command_parser


def get_config_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `config` and `config default`; alone, or as one of `subparsers`."""
    parser = command_parser("config", subparsers, "ask a few questions and write the launcher's configuration file")
    parser.add_argument("--config_file", help="where to write; by default where the launcher looks")
    parser.set_defaults(func=config_command)
    default_command_parser(parser.add_subparsers(dest="subcommand", metavar="default"))
    return parser


def config_command(args: argparse.Namespace) -> int:
    path = Path(args.config_file or default_config_path())
    config = get_cluster_input()
    config.to_yaml_file(path)
    print(f"configuration saved at {path}")
    return 0
