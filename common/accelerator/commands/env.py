"""Print what a bug report needs: versions, hardware, the launcher's configuration, the variables that matter."""

import argparse
import os

from .config.config_args import ConfigError, default_config_path, load_config_from_file
from .utils import CustomArgumentParser, command_parser

PREFIXES = ("ACCELERATE_", "CUDA_", "GLOO_", "MASTER_", "NCCL_", "OMP_", "TORCH")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HF_HOME", "XDG_CACHE_HOME")


def env_command_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `env`; alone, or as one of `subparsers`."""
    parser = command_parser("env", subparsers, __doc__)
    parser.add_argument("--config_file", help="report this file instead of the default one")
    parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> int:
    """Print the report and return the exit code. A configuration that cannot be used is part of the report."""
    from torch.utils.collect_env import get_pretty_env_info

    print(get_pretty_env_info())
    print("Environment:")
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            print(f"    {name}={value}")
    path = args.config_file or default_config_path()
    print(f"Configuration {path}:")
    if args.config_file is None and not os.path.exists(path):
        print("    none")
        return 0
    try:
        print(f"    {load_config_from_file(path)}")
    except ConfigError as error:
        print(f"    cannot be used: {error}")
    return 0
