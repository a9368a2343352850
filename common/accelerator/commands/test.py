"""Check this machine and its configuration with a real run: sharding, gathering, equal weights; prints a verdict."""

import argparse
import subprocess
import sys

from .config.config_args import default_config_path
from .utils import CustomArgumentParser, command_parser


def test_command_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `test`; alone, or as one of `subparsers`."""
    parser = command_parser("test", subparsers, __doc__)
    parser.add_argument("--config_file", help="the configuration to check; by default the default one")
    parser.add_argument("--num_processes", type=int, help="by default one per GPU, or 2 on the CPU")
    parser.add_argument("--cpu", action="store_true", help="check the CPU whatever the machine has")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> int:
    """Launch `self_check` as the configuration says and return the exit code."""
    core = __package__.removesuffix(".commands")
    launch = [sys.executable, "-m", core, "launch", *launch_arguments(args)]
    code = subprocess.run(launch, check=False).returncode
    if code:
        print("FAILED: the reason stands above")
    return code


def launch_arguments(args: argparse.Namespace) -> list[str]:
    """The command line of the launch that checks what `args` ask for."""
    import torch

    arguments = []
    on_cpu = args.cpu
    num_processes = args.num_processes
    nothing_is_configured = not args.config_file and not default_config_path().is_file()
    if num_processes is None and nothing_is_configured:
        gpus = torch.cuda.device_count()
        num_processes = max(2, gpus)
        on_cpu = on_cpu or gpus < 2
    if args.config_file:
        arguments.append(f"--config_file={args.config_file}")
    if num_processes is not None:
        arguments.append(f"--num_processes={num_processes}")
    if on_cpu:
        arguments.append("--cpu")
    return [*arguments, "--module", f"{__package__}.self_check"]
