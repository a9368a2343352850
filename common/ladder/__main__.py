"""Two levels' changes, a level on the small abstractions, a ring all-reduce, or an exercise.

python -m common.ladder diff 01 02
python -m common.ladder diff 02 fsdp
python -m common.ladder run 03 --small
python -m common.ladder run 03 --small --processes 2
python -m common.ladder ring
python -m common.ladder check --list
python -m common.ladder check average_gradients
python -m common.ladder check average_gradients path/to/solution.py
"""

import argparse
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from common import exercises
from common.exercises.stage import check
from common.ladder import ROOT, levels, named, small
from common.ladder.diffs import unified


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m common.ladder", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("diff", help="what changes from one script to another")
    command.add_argument("before", type=script_name, metavar="LEVEL", help="such as 01, fsdp, or 03/train_full")
    command.add_argument("after", type=script_name, metavar="LEVEL", help="such as 02")
    run = commands.add_parser(
        "run",
        help="a level's train.py on common.small",
        epilog="All other flags are those of the level's train.py.",
    )
    run.add_argument("level", type=script_name, metavar="LEVEL", help="such as 03")
    runnable = ", ".join(small.COUNTERPARTS)
    run.add_argument("--small", action="store_true", required=True, help=f"on common.small: one of {runnable}")
    run.add_argument("--processes", type=int, metavar="N", help="under torchrun, with N processes on this machine")
    commands.add_parser("ring", help="a ring all-reduce of four ranks, message by message")
    check = commands.add_parser("check", help="what is wrong with your solution of an exercise")
    check.add_argument("exercise", nargs="?", metavar="EXERCISE", help="without PATH, its task is printed")
    check.add_argument("solution", nargs="?", type=Path, metavar="PATH", help="the Python file with your solution")
    check.add_argument("--list", action="store_true", help="the exercises, a line for each")
    return parser


def script_name(text: str) -> str:
    """The script that a user names; argparse shows the message of its own error only."""
    try:
        return named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_solution(exercise: str, solution: Path) -> None:
    """Print the verdict on a solution; the exit code is 1 where something is wrong with it."""
    mistake = check(exercise, solution)
    if mistake:
        print(f"NOT YET: {exercise}\n\n{textwrap.indent(mistake, '  ')}")
        sys.exit(1)
    print(f"PASSED: {exercise}\n\n  The same numbers as {exercises.EXERCISES[exercise].same_as}.")
    following = exercises.following(exercise)
    if following:
        print(f"  Next: python -m common.ladder check {following}")
    else:
        print("  That was the last exercise.")


def list_exercises() -> None:
    """Print a line for each exercise, in the order of the climb."""
    for name in exercises.NAMES:
        print(f"{name:<18} {exercises.EXERCISES[name].minutes:>3} min  {exercises.title(name)}")
    print("\nThe task and the file to begin with: python -m common.ladder check NAME")


def show_task(exercise: str) -> None:
    """Print the task of an exercise, what to read first, and the commands with which to begin and to check."""
    print(f"{exercises.task(exercise)}\n")
    print(f"About {exercises.EXERCISES[exercise].minutes} minutes. Read first: {exercises.EXERCISES[exercise].read}\n")
    print("Begin with:")
    print(f"    cp {os.path.relpath(exercises.starter(exercise))} my_{exercise}.py")


def run_level(options: argparse.Namespace, flags: list[str]) -> None:
    """Train as the level's own command does, on the small counterparts of what it imports."""
    if options.processes:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.processes), "-m", "--", "common.ladder", "run", options.level]
        sys.exit(subprocess.call([*command, "--small", *flags]))
    try:
        module = small.load_small(options.level)
    except ValueError as error:
        parser().error(str(error))
    # These are the last two lines of every script.
    args = module.prepare_process(module.parse_args(module.__file__, flags))
    module.train(args)


def show_diff(before: str, after: str) -> None:
    """Print what changes from one script to another."""
    changes = unified(before, after)
    signs = [line[0] for line in changes.splitlines()[2:] if line[1:].strip()]
    print(f"{before} → {after}: {signs.count('+')} lines added, {signs.count('-')} removed")
    print("without blank lines and the text on top of each file\n")
    print(changes, end="")


def main(argv: list[str] | None = None) -> None:
    if not levels():
        sys.exit(f"error: no level lies in {ROOT}: clone the repository, and install it by `pip install -e .` there")
    options, flags = parser().parse_known_args(argv)
    if flags and options.command != "run":
        parser().error(f"unrecognized arguments: {' '.join(flags)}")
    if options.command == "run":
        run_level(options, flags)
    elif options.command == "check":
        try:
            if options.list or options.exercise is None:
                list_exercises()
            elif options.solution is None:
                show_task(options.exercise)
            else:
                check_solution(options.exercise, options.solution)
        except ValueError as error:
            parser().error(str(error))
    elif options.command == "ring":
        from common.ladder import ring

        sys.stdout.write(ring.text(ring.trace()))
    else:
        show_diff(options.before, options.after)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
