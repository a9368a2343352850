"""Run the classic mistakes of parallel training, and what catches each of them.

    python -m common.pitfalls                      all, a line or two for each
    python -m common.pitfalls padded_evaluation    one, with its source
    python -m common.pitfalls --quiz               asks before it shows
    python -m common.pitfalls --list               what there is

They run on two or three CPU processes with gloo, on a machine with GPUs too,
and take some fifteen seconds. The exit code is 0 if every detector has found
the mistake and found nothing in the correction.
"""

import argparse
import importlib
import sys
import textwrap
import time
from collections.abc import Sequence

from common.pitfalls import NAMES, explanation, module_name, source, title
from common.pitfalls.examine import examine


def run_all(modules: list[str]) -> bool:
    """Print a table, row by row. True if all mistakes were caught."""
    started = time.perf_counter()
    caught = 0
    print(_row("mistake", "wrong", "right"), flush=True)
    for module in modules:
        verdict = examine(module)
        caught += verdict.caught
        row = _row(module.rpartition(".")[2], verdict.wrong, verdict.right)
        print(f"{row}\n{_indented(str(verdict))}", flush=True)
    seconds = time.perf_counter() - started
    outcome = "CAUGHT" if caught == len(modules) else "NOT ALL CAUGHT"
    print(
        f"\n{outcome}: {caught} of {len(modules)} mistakes, in {seconds:.0f} s"
    )
    return caught == len(modules)


def run_one(name: str) -> bool:
    """Print the source of a pitfall and its verdict. True if it was caught."""
    pitfall = importlib.import_module(module_name(name))
    verdict = examine(module_name(name))
    code = source(name).removeprefix(f'"""{explanation(name)}\n"""').strip()
    parts = [
        explanation(name),
        f"common/pitfalls/{name}.py, met at {', '.join(pitfall.LEVELS)}:",
        code,
        f"On {pitfall.WORLD_SIZE} processes:",
        f"    wrong:  {verdict.wrong}\n    right:  {verdict.right}",
        _indented(str(verdict)),
    ]
    print("\n\n".join(parts))
    return verdict.caught


def quiz(names: Sequence[str]) -> bool:
    """Show each mistake as code, wait for a guess, and then say what it is.

    True if all that were shown were caught. It ends where the reader does.
    """
    all_caught = True
    for number, name in enumerate(names, 1):
        pitfall = importlib.import_module(module_name(name))
        processes = f"on {pitfall.WORLD_SIZE} processes"
        print(f"Question {number} of {len(names)}, {processes}:")
        print(f"\n{question(name)}\n")
        if not _wants_the_answer():
            break
        verdict = examine(module_name(name))
        all_caught = all_caught and verdict.caught
        print(f"\n{name}: {explanation(name)}\n")
        print(f"    wrong:  {verdict.wrong}\n    right:  {verdict.right}\n")
        print(f"{_indented(str(verdict))}\n", flush=True)
    return all_caught


def question(name: str) -> str:
    """The code of a pitfall up to its mistake, without what explains it."""
    code = source(name).removeprefix(f'"""{explanation(name)}\n"""')
    until_the_correction, _, _ = code.partition("\ndef right(")
    return until_the_correction.strip()


def _wants_the_answer() -> bool:
    try:
        guess = input("What is wrong? Enter shows the answer, q ends: ")
    except EOFError:
        return False
    return guess.strip().lower() != "q"


def _row(*cells: str) -> str:
    return "{:<24} {:<25} {}".format(*cells)


def _indented(text: str) -> str:
    return textwrap.fill(
        text, 78, initial_indent="    ", subsequent_indent="    "
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m common.pitfalls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="one, with its source"
    )
    parser.add_argument(
        "--quiz", action="store_true", help="ask before showing, one or all"
    )
    parser.add_argument("--list", action="store_true", help="what there is")
    args = parser.parse_args(argv)
    if args.name not in (None, *NAMES):
        parser.error(f"there is no pitfall {args.name}; --list names them")
    if args.list:
        for name in NAMES:
            print(f"{name}\n{_indented(title(name))}")
        return 0
    try:
        if args.quiz:
            all_caught = quiz([args.name] if args.name else NAMES)
        elif args.name:
            all_caught = run_one(args.name)
        else:
            all_caught = run_all([module_name(name) for name in NAMES])
        return 0 if all_caught else 1
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
