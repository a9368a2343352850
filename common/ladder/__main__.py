"""A tour of the ladder; or the changes between two levels, a level on the small abstractions, a check of an exercise.

python -m common.ladder
python -m common.ladder diff 01 02
python -m common.ladder diff 01 02 --html
python -m common.ladder run 03 --small
python -m common.ladder run 03 --small --processes 2
python -m common.ladder check
python -m common.ladder check average_gradients path/to/solution.py
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from common.ladder import exercises, html_page, small, terminal, tour
from common.ladder.scripts import load, named


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m common.ladder", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("diff", help="what changes from one script to another")
    command.add_argument("before", type=rung, metavar="LEVEL", help="such as 01, or 03/train_full")
    command.add_argument("after", type=rung, metavar="LEVEL", help="such as 02")
    command.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=Path("diff.html"),
        metavar="PATH",
        help="side by side, by default %(const)s",
    )
    run = commands.add_parser(
        "run",
        help="a level's train.py, also on common.small",
        epilog="All other flags are those of the level's train.py.",
    )
    run.add_argument("level", type=rung, metavar="LEVEL", help="such as 03")
    run.add_argument("--small", action="store_true", help=f"on common.small: one of {', '.join(small.IMPORTS)}")
    run.add_argument("--processes", type=int, metavar="N", help="under torchrun, with N processes on this machine")
    check = commands.add_parser("check", help="what is wrong with your solution of an exercise")
    check.add_argument("exercise", nargs="?", metavar="EXERCISE", help="without it, the exercises are listed")
    check.add_argument("solution", nargs="?", type=Path, metavar="PATH", help="a Python file")
    return parser


def rung(text: str) -> str:
    """The rung that a user names; argparse shows the message of its own error only."""
    try:
        return named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_solution(exercise: str | None, solution: Path | None) -> None:
    """Print the tasks, or the verdict on a solution; the exit code is 1 where something is wrong with it."""
    if exercise is None:
        for name in exercises.NAMES:
            print(f"{name}: {exercises.task(name)}\n")
        return
    try:
        if solution is None:
            print(exercises.task(exercise))
            return
        findings = exercises.check(exercise, solution)
    except ValueError as error:
        parser().error(str(error))
    if findings:
        print(f"NOT YET: {exercise}")
        for finding in findings:
            print(f"  {finding}")
        sys.exit(1)
    print(f"PASSED: {exercise}")


def run_level(options: argparse.Namespace, flags: list[str]) -> None:
    """Train as the level's own command does; `--small` changes the imports of its script."""
    if options.processes:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.processes), "-m", "common.ladder", "run", options.level]
        command += ["--small", *flags] if options.small else flags
        sys.exit(subprocess.call(command))
    try:
        module = small.load_small(options.level) if options.small else load(options.level)
    except ValueError as error:
        parser().error(str(error))
    sys.argv = [module.__file__, *flags]
    module.main()


def main(argv: list[str] | None = None) -> None:
    options, flags = parser().parse_known_args(argv)
    if flags and options.command != "run":
        parser().error(f"unrecognized arguments: {' '.join(flags)}")
    if options.command is None:
        sys.stdout.write(tour.text(tour.look()))
    elif options.command == "run":
        run_level(options, flags)
    elif options.command == "check":
        check_solution(options.exercise, options.solution)
    elif options.html:
        page = html_page.page([options.before, options.after])
        try:
            options.html.write_text(page)
        except OSError as error:
            sys.exit(f"error: {options.html} cannot be written: {error.strerror}")
        print(f"Written: {options.html}")
    else:
        colour = terminal.wants_colour(sys.stdout)
        width = shutil.get_terminal_size().columns
        sys.stdout.write(terminal.diff_text(options.before, options.after, colour, width))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
