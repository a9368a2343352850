"""The launcher's configuration file: `config_args` reads it, `default` writes one for this machine."""

import argparse

from ..utils import CustomArgumentParser, command_parser
from .default import default_command_parser


def get_config_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `config default`; alone, or as one of `subparsers`."""
    parser = command_parser("config", subparsers, "write the launcher's configuration file")
    default_command_parser(parser.add_subparsers(dest="subcommand", required=True, metavar="default"))
    return parser
