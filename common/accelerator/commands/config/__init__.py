"""The launcher's configuration file: `config_args` reads it; `config` and `default` write it."""

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

__all__ = [
    "ClusterConfig",
    "ConfigError",
    "UnsupportedConfig",
    "default_config_file",
    "default_config_path",
    "get_config_parser",
    "load_config_from_file",
]


def get_config_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `config` and `config default`; alone, or as one of `subparsers`."""
    parser = config_command_parser(subparsers)
    ways = parser.add_subparsers(dest="subcommand", metavar="default")
    default_command_parser(ways)
    return parser
