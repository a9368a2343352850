"""What changes between two levels, a check of an exercise, or, without a command, a tour of the ladder.

python -m common.ladder
python -m common.ladder diff 01 02
python -m common.ladder diff 01 02 --html
python -m common.ladder check
python -m common.ladder check average_gradients path/to/solution.py
"""

import argparse
import sys
from pathlib import Path

from common.ladder import exercises, html_page, terminal, tour
from common.ladder.scripts import named


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


def main(argv: list[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if options.command is None:
        sys.stdout.write(tour.text(tour.look()))
    elif options.command == "check":
        check_solution(options.exercise, options.solution)
    elif options.html:
        options.html.write_text(html_page.page([options.before, options.after]))
        print(f"Written: {options.html}")
    else:
        colour = terminal.wants_colour(sys.stdout)
        sys.stdout.write(terminal.diff_text(options.before, options.after, colour))


if __name__ == "__main__":
    main()
