"""The launcher's configuration file: `config_args` reads it; `config`, `default` and `update` write it."""

import argparse

from ..utils import CustomArgumentParser
from .config import config_command_parser
from .config_args import (
    ClusterConfig,
    ConfigError,
    UnsupportedConfig,
    default_config_file,
    default_config_path,
    load_config_from_file,
)
from .default import default_command_parser
from .update import update_command_parser

__all__ = [
    "ClusterConfig",
    "ConfigError",
    "UnsupportedConfig",
    "config_command_parser",
    "default_command_parser",
    "default_config_file",
    "default_config_path",
    "get_config_parser",
    "load_config_from_file",
    "update_command_parser",
]


def get_config_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `config`, `config default` and `config update`; alone, or as one of `subparsers`."""
    parser = config_command_parser(subparsers)
    ways = parser.add_subparsers(dest="subcommand", metavar="default|update")
    default_command_parser(ways)
    update_command_parser(ways)
    return parser
