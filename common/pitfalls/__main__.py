"""Run the classic mistakes of parallel training, and what catches each of them.

    python -m common.pitfalls                      all, a line or two for each
    python -m common.pitfalls padded_evaluation    one, with its source
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
from dataclasses import dataclass

from common.pitfalls import NAMES, explanation, module_name, source, title
from common.pitfalls.ranks import Ranks


@dataclass(frozen=True)
class Verdict:
    """Both versions of a pitfall in numbers, and what the detector says of it.

    Where the ranks have different numbers, all are there.
    """

    wrong: str
    right: str
    finding: str | None
    false_alarm: str | None

    @property
    def caught(self) -> bool:
        return self.finding is not None and self.false_alarm is None

    def __str__(self) -> str:
        if self.finding is None:
            return "MISSED: the detector is silent about the mistake"
        if self.false_alarm is not None:
            return f"FALSE ALARM about the correction: {self.false_alarm}"
        return f"caught: {self.finding}"


def examine(module: str, ranks: Ranks) -> Verdict:
    """Run both versions. RuntimeError if a rank fails where it should not."""
    world_size = importlib.import_module(module).WORLD_SIZE
    numbers, findings = [], []
    for version in ("wrong", "right"):
        reports = ranks.play(module, version, world_size)
        numbers.append(
            " / ".join(dict.fromkeys(report.number for report in reports))
        )
        found = (report.finding for report in reports if report.finding)
        findings.append(next(found, None))
    return Verdict(*numbers, *findings)


def run_all(modules: list[str], ranks: Ranks) -> bool:
    """Print a table, row by row. True if all mistakes were caught."""
    started, caught = time.perf_counter(), 0
    print(_row("mistake", "wrong", "right"), flush=True)
    for module in modules:
        verdict = examine(module, ranks)
        caught += verdict.caught
        row = _row(module.rpartition(".")[2], verdict.wrong, verdict.right)
        print(f"{row}\n{_indented(str(verdict))}", flush=True)
    seconds = time.perf_counter() - started
    outcome = "CAUGHT" if caught == len(modules) else "NOT ALL CAUGHT"
    print(
        f"\n{outcome}: {caught} of {len(modules)} mistakes, in {seconds:.0f} s"
    )
    return caught == len(modules)


def run_one(name: str, ranks: Ranks) -> bool:
    """Print the source of a pitfall and its verdict. True if it was caught."""
    pitfall = importlib.import_module(module_name(name))
    verdict = examine(module_name(name), ranks)
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
    parser.add_argument("--list", action="store_true", help="what there is")
    args = parser.parse_args(argv)
    if args.name not in (None, *NAMES):
        parser.error(f"there is no pitfall {args.name}; --list names them")
    if args.list:
        print("\n".join(f"{name}\n{_indented(title(name))}" for name in NAMES))
        return 0
    try:
        with Ranks() as ranks:
            if args.name:
                return 0 if run_one(args.name, ranks) else 1
            return 0 if run_all([*map(module_name, NAMES)], ranks) else 1
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
