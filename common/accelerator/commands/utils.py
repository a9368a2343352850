"""The argument parser of all commands: one line for what is wrong, and options spelt with `_` or with `-`."""

import argparse
from typing import Any, NoReturn


class CustomArgumentParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, and takes `--num-processes` for `--num_processes`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Like argparse's. A long option with an underscore has a second spelling, which the help leaves out."""
        action = super().add_argument(*names, **kwargs)
        for name in names:
            if name.startswith("--") and "_" in name:
                self._option_string_actions[name.replace("_", "-")] = action
        return action

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def command_parser(name: str, subparsers: argparse._SubParsersAction | None, description: str) -> CustomArgumentParser:
    """A parser for the command `name`: one of `subparsers`, or one that stands alone where that is None."""
    if subparsers is None:
        parser = CustomArgumentParser(name, description=description)
    else:
        summary = description.splitlines()[0]
        parser = subparsers.add_parser(name, help=summary, description=description)
    parser.set_defaults(parser=parser)
    return parser
