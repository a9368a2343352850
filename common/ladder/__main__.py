"""Shows what changes between two levels, trains a level on common.small, traces a ring, and checks exercises.

python -m common.ladder diff 01 02
python -m common.ladder diff 02 fsdp
python -m common.ladder small 03
python -m common.ladder small 03 --processes 2
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
from common.errors import fail
from common.exercises import runner
from common.exercises.compare import Mistake
from common.flag_types import positive
from common.ladder import ROOT, find_script, ring, small, unified_diff
from common.levels import LEVELS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m common.ladder", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    diff_command = commands.add_parser("diff", help="what changes from one script to another")
    diff_command.add_argument("before", type=find_script, metavar="LEVEL", help="such as 01, fsdp, or 03/train_full")
    diff_command.add_argument("after", type=find_script, metavar="LEVEL", help="such as 02")

    small_command = commands.add_parser(
        "small", help="trains a level on common.small", epilog="All other flags are those of the level's train.py."
    )
    flag = small_command.add_argument
    flag("level", type=find_script, choices=small.COUNTERPARTS, metavar="LEVEL", help="such as 03")
    flag("--processes", type=positive, metavar="N", help="under torchrun, with N processes on this machine")

    commands.add_parser("ring", help="a ring all-reduce of four ranks, message by message")

    check_command = commands.add_parser("check", help="what is wrong with your solution of an exercise")
    flag = check_command.add_argument
    flag("exercise", nargs="?", choices=exercises.NAMES, metavar="EXERCISE", help="without PATH, its task is printed")
    flag("solution", nargs="?", type=Path, metavar="PATH", help="the file with your solution")
    flag("--list", action="store_true", help="the exercises, a line for each")
    return parser


def show_diff(before: str, after: str) -> None:
    changes = unified_diff(before, after)
    signs = [line[0] for line in changes.splitlines()[2:] if line[1:].strip()]
    print(f"{before} → {after}: {signs.count('+')} lines added, {signs.count('-')} removed")
    print("without blank lines and the text on top of each file\n")
    print(changes, end="")


def train_on_small(level: str, processes: int | None, flags: list[str]) -> None:
    """Train as the level's own command does with `flags`, on the small counterparts of what the level imports."""
    if processes:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "--", "common.ladder", "small", level, *flags]
        sys.exit(subprocess.call(command))
    module = small.load_small(level)
    # These are the last two lines of every script.
    args = module.prepare_process(module.parse_args(module.__file__, flags))
    module.train(args)


def list_exercises() -> None:
    for name, exercise in exercises.EXERCISES.items():
        print(f"{name:<18} {exercise.minutes:>3} min  {exercises.title(name)}")
    print("\nThe task and the file to begin with: python -m common.ladder check NAME")


def show_task(name: str) -> None:
    """Print the task of an exercise, which ends with the command of its check, and how to begin."""
    print(f"{exercises.task(name)}\n")
    exercise = exercises.EXERCISES[name]
    print(f"About {exercise.minutes} minutes. Read first: {exercise.read}\n")
    print("Begin with:")
    print(f"    cp {os.path.relpath(exercises.starter(name))} my_{name}.py")


def check_solution(name: str, solution: Path) -> None:
    """Print the verdict on a solution; the exit code is 1 where something is wrong with it."""
    if not solution.is_file():
        fail(f"there is no file {solution}")
    try:
        runner.check_solution(name, solution)
    except Mistake as mistake:
        print(f"NOT YET: {name}\n\n{textwrap.indent(str(mistake), '  ')}")
        sys.exit(1)
    print(f"PASSED: {name}\n\n  The same numbers as {exercises.EXERCISES[name].same_as}.")
    following = exercises.following(name)
    if following:
        print(f"  Next: python -m common.ladder check {following}")
    else:
        print("  That was the last exercise.")


def main(argv: list[str] | None = None) -> None:
    if not (ROOT / LEVELS[0]).is_dir():
        sys.exit(f"error: no level lies in {ROOT}: clone the repository, and install it by `pip install -e .` there")
    parser = make_parser()
    options, level_flags = parser.parse_known_args(argv)
    if level_flags and options.command != "small":
        parser.error(f"unrecognized arguments: {' '.join(level_flags)}")
    if options.command == "diff":
        show_diff(options.before, options.after)
    elif options.command == "small":
        train_on_small(options.level, options.processes, level_flags)
    elif options.command == "ring":
        print(ring.text(ring.trace()), end="")
    elif options.list or options.exercise is None:  # the command is `check`
        list_exercises()
    elif options.solution is None:
        show_task(options.exercise)
    else:
        check_solution(options.exercise, options.solution)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
