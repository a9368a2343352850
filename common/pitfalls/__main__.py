"""Run the classic mistakes of parallel training, and what catches each of them.

    python -m common.pitfalls                      all, a line or two for each
    python -m common.pitfalls padded_evaluation    one, with its source
    python -m common.pitfalls --quiz               asks, and keeps the score
    python -m common.pitfalls --list               what there is

They run on two or three CPU processes with gloo, on a machine with GPUs too,
and take some fifteen seconds. The exit code is 0 if every detector has found
the mistake and found nothing in the correction.
"""

import argparse
import importlib
import random
import signal
import sys
import textwrap
import time
from collections.abc import Sequence

from common.pitfalls import (
    NAMES,
    explanation,
    module_name,
    source,
    symptom,
    title,
)
from common.pitfalls.examine import examine
from common.pitfalls.excerpt import excerpt

LETTERS = "abcd"
QUIT = "q"


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
    """Show each mistake as code, ask which one it is, and then show it run.

    True if all that were shown were caught. It ends where the reader does.
    """
    all_caught = True
    answered = 0
    right = 0
    for number, name in enumerate(names, 1):
        pitfall = importlib.import_module(module_name(name))
        processes = f"on {pitfall.WORLD_SIZE} processes"
        print(f"Question {number} of {len(names)}, {processes}:")
        print(f"\n{excerpt(name, 'wrong')}\n")
        choices = answers(name)
        for letter, choice in choices.items():
            print(f"  {letter}  {title(choice)}")
        answer = _asked(choices)
        if answer == QUIT:
            break
        answered += 1
        if answer and choices[answer] == name:
            right += 1
            print("\nRight.")
        else:
            [letter] = [each for each in choices if choices[each] == name]
            print(f"\nIt is {letter}.")
        verdict = examine(module_name(name))
        all_caught = all_caught and verdict.caught
        print(f"\n{name}: {explanation(name)}\n")
        print(f"    wrong:  {verdict.wrong}\n    right:  {verdict.right}\n")
        print(f"{_indented(str(verdict))}\n\nCorrected:\n")
        corrected = excerpt(name, "right", but_for="wrong")
        print(f"{textwrap.indent(corrected, '    ')}\n", flush=True)
    if answered:
        print(f"Score: {right} of {answered}")
    return all_caught


def answers(name: str) -> dict[str, str]:
    """The pitfalls to choose from, by letter: the right one and some others.

    They are the same ones in the same order each time.
    """
    chance = random.Random(name)
    others = [each for each in NAMES if each != name]
    choices = [name, *chance.sample(others, len(LETTERS) - 1)]
    chance.shuffle(choices)
    return dict(zip(LETTERS, choices, strict=True))


def _asked(choices: dict[str, str]) -> str:
    """The letter that the reader chooses, "" for the answer at once, or QUIT.

    Anything else is asked again.
    """
    prompt = f"Which one is it? {', '.join(choices)}; Enter shows it, q ends: "
    while True:
        try:
            answer = input(prompt).strip().lower()
        except EOFError:
            return QUIT
        if answer in ("", QUIT, *choices):
            return answer
        print(f"{answer!r} is none of the answers.")


def _import_torch() -> None:
    """Import what takes seconds. A Ctrl-C meanwhile ends this process at once.

    Some of torch's modules would lose a KeyboardInterrupt, and others would
    abort with a message of C++.
    """
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:  # a shell ignores it for what it runs behind
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("common.pitfalls.stage")
    importlib.import_module("common.processes")
    signal.signal(signal.SIGINT, before)


def _row(*cells: str) -> str:
    return "{:<23} {:<33} {}".format(*cells)


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
        "--quiz",
        action="store_true",
        help="ask before showing, and keep the score",
    )
    parser.add_argument("--list", action="store_true", help="what there is")
    args = parser.parse_args(argv)
    if args.name not in (None, *NAMES):
        parser.error(f"there is no pitfall {args.name}; --list names them")
    if args.list:
        for name in NAMES:
            print(f"{name} ({symptom(name)})\n{_indented(title(name))}")
        return 0
    _import_torch()
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
