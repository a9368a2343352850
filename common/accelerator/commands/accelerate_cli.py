"""The command line's entrance: one parser, four commands, one line for whatever is wrong."""

import argparse
import sys

from . import env, launch, test
from .config import ConfigError, config
from .config.config_args import suggestion


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, and spells every option with `_` and with `-`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def add_argument(self, *names, **kwargs):
        dashed = [name.replace("_", "-") for name in names if name.startswith("--") and "_" in name]
        return super().add_argument(*names, *dashed, **kwargs)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for a request that cannot be met, said in one line on stderr."""
    parser = CommandParser(prog="python -m common.accelerator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="launch|config|test|env")
    for module in (launch, config, test, env):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        option = unknown[0].partition("=")[0]
        args.parser.error(f"unknown argument {option}{suggestion(option, args.parser._option_string_actions)}")
    try:
        return args.run(args)
    except ConfigError as error:
        print(f"{args.parser.prog}: {error}", file=sys.stderr)
        return 2
