"""`config default`: write a configuration for the hardware of this machine without asking anything."""

import argparse
import os
import sys
from pathlib import Path

from ...state import PRECISIONS, choose_precision
from ..utils import CustomArgumentParser, command_parser
from .config_args import ClusterConfig, default_config_path


def default_command_parser(parser: argparse._SubParsersAction, parents: object = None) -> CustomArgumentParser:
    """The parser of `config default`, as one of the subcommands of `parser`; `parents` are not needed here."""
    command = command_parser("default", parser, __doc__)
    # Without a default it leaves the file of `config --config_file FILE default` as it is.
    command.add_argument("--config_file", default=argparse.SUPPRESS, help="where to write, if not where launch looks")
    command.add_argument("--mixed_precision", choices=PRECISIONS, default="no")
    command.set_defaults(func=default_config_command)
    return command


def default_config_command(args: argparse.Namespace) -> int:
    """Write the file and return the exit code: 1 where a file is there already."""
    path = write_basic_config(args.mixed_precision, args.config_file)
    if not path:
        return 1
    print(f"configuration saved at {path}")
    return 0


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike | None = None) -> Path | bool:
    """Write a configuration for all GPUs of this machine, or for one process on the CPU, and return its path.

    A file that exists is left as it is, and False returned. Raises ValueError for an unknown precision, and ConfigError
    for a place that cannot be written.
    """
    import torch

    path = Path(save_location or default_config_path())
    if path.exists():
        print(f"{path} exists and is left as it is: remove it or choose another place", file=sys.stderr)
        return False
    precision = choose_precision(mixed_precision)
    gpus = torch.cuda.device_count()
    config = ClusterConfig(
        distributed_type="MULTI_GPU" if gpus > 1 else "NO",
        num_processes=max(1, gpus),
        mixed_precision=precision,
        use_cpu=gpus == 0,
    )
    config.to_yaml_file(path)
    return path
