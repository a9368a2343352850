"""Run the classic mistakes of parallel training, and what catches each of them.

    python -m common.pitfalls                      all, a line or two for each
    python -m common.pitfalls padded_evaluation    one, with its source
    python -m common.pitfalls --quiz [NAME]        guess before each runs
    python -m common.pitfalls --list               what there is

They run on two or three CPU processes with gloo, on a machine with GPUs too,
and take some fifteen seconds. The exit code is 0 if every detector has found
the mistake and found nothing in the correction.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Sequence

from common.pitfalls import NAMES, PITFALLS, load, title
from common.pitfalls.runner import Verdict, examine


def show_verdict(name: str, verdict: Verdict) -> None:
    if verdict.finding is None:
        text = "NOT CAUGHT: the check missed the mistake"
    elif verdict.false_alarm is not None:
        text = "NOT CAUGHT: the check complains about the correction: "
        text += verdict.false_alarm
    else:
        text = f"caught: {verdict.finding}"
    print(f"{name}\n{_indented(text)}", flush=True)


def run_all() -> bool:
    """True if all mistakes were caught."""
    caught = 0
    for name in NAMES:
        verdict = examine(name)
        show_verdict(name, verdict)
        caught += verdict.caught
    print(f"\nCAUGHT: {caught} of {len(NAMES)} mistakes")
    return caught == len(NAMES)


def show_mistake(name: str) -> None:
    """Print the code with the mistake, without the text that explains it.

    The imports are left out: some are of the correction alone.
    """
    source = inspect.getsource(load(name))
    _, *statements = ast.parse(source).body
    imports = (ast.Import, ast.ImportFrom)
    code = [each for each in statements if not isinstance(each, imports)]
    lines = source.splitlines()[code[0].lineno - 1 :]
    mistake, _, _ = "\n".join(lines).partition("\ndef right")
    processes = PITFALLS[name].world_size
    print(f"On {processes} processes:\n\n{mistake.strip()}\n")


def show_answer(name: str) -> bool:
    """Print what is wrong, what catches it, the correction. True if caught."""
    pitfall = load(name)
    print(f"{inspect.getdoc(pitfall)}\n", flush=True)
    verdict = examine(name)
    show_verdict(name, verdict)
    print(f"\nThe correction and the check (common/pitfalls/{name}.py):\n")
    print(inspect.getsource(pitfall.right))
    print(inspect.getsource(pitfall.detect), flush=True)
    if hasattr(pitfall, "gradients"):
        print(inspect.getsource(pitfall.gradients.largest_difference))
    return verdict.caught


def quiz(names: Sequence[str]) -> bool:
    """Show each mistake as code, let the reader guess, and then show it run.

    True if all that were shown were caught.
    """
    caught = []
    for number, name in enumerate(names, start=1):
        print(f"Question {number} of {len(names)}")
        show_mistake(name)
        if input("What is wrong with it? Enter shows it, q ends: ") == "q":
            break
        caught.append(show_answer(name))
    return all(caught)


def _indented(text: str) -> str:
    return textwrap.indent(textwrap.fill(text, 76), "    ")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m common.pitfalls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", choices=NAMES)
    parser.add_argument("--quiz", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    if args.list:
        for name in NAMES:
            symptom = PITFALLS[name].symptom
            print(f"{name} ({symptom})\n{_indented(title(name))}")
        return 0
    if args.quiz:
        all_caught = quiz([args.name] if args.name else NAMES)
    elif args.name:
        show_mistake(args.name)
        all_caught = show_answer(args.name)
    else:
        all_caught = run_all()
    return 0 if all_caught else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
