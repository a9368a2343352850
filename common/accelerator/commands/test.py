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
    parser.add_argument("--num_processes", type=int, help="by default what the configuration says, without one 2")
    parser.add_argument("--cpu", action="store_true", help="check the CPU whatever the machine has")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> int:
    """Launch `self_check` as the configuration says and return the exit code."""
    core = __package__.removesuffix(".commands")
    command = [sys.executable, "-m", core, "launch"]
    num_processes = args.num_processes
    if args.config_file:
        command.append(f"--config_file={args.config_file}")
    elif num_processes is None and not default_config_path().is_file():
        num_processes = 2
    if num_processes is not None:
        command.append(f"--num_processes={num_processes}")
    if args.cpu:
        command.append("--cpu")
    code = subprocess.run([*command, "--module", f"{__package__}.self_check"], check=False).returncode
    if code:
        print("FAILED: the reason stands above")
    return code
