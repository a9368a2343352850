"""The list of levels, how to load them, what changes between them, and, without a command, a tour of them.

python -m common.ladder
python -m common.ladder diff 01 02
python -m common.ladder diff 01 02 --html
"""

import argparse
import ast
import difflib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTED = ("02_ddp_raw", "03_accelerate", "04_trainer")
CONTEXT = 3  # equal lines shown around a change


def levels() -> list[str]:
    """The names of the levels, in the order of the climb."""
    return sorted(path.parent.name for path in ROOT.glob("0?_*/train.py"))


def named(prefix: str) -> str:
    """The level whose name begins with `prefix`, such as "01"; ValueError if there is not exactly one."""
    found = [level for level in levels() if level.startswith(prefix.rstrip("/"))]
    if len(found) != 1:
        raise ValueError(f"{prefix!r} names no level: one of {', '.join(levels())}, or the beginning of one")
    return found[0]


def script(level: str) -> Path:
    return ROOT / level / "train.py"


def load(level: str, path: Path | None = None) -> ModuleType:
    """The level's train.py, or another version of it at `path`, as a module: the folders' names are no identifiers."""
    spec = importlib.util.spec_from_file_location(f"ladder_{level}", path or script(level))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def story(level: str) -> list[str]:
    """The lines of the level's train.py that a reader has to understand: not the module docstring, not blank ones."""
    return [line for line in source(level)[docstring_end(level) :] if line.strip()]


def source(level: str) -> list[str]:
    return script(level).read_text().splitlines()


def docstring_end(level: str) -> int:
    """The number of the last line of the module docstring and of the blank ones after it; 0 if there is none."""
    lines = source(level)
    first = ast.parse("\n".join(lines)).body[0]
    end = first.end_lineno if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else 0
    while end and not lines[end].strip():
        end += 1
    return end


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """How many lines of the story one level adds to the other, and how many it removes."""
    diff = list(difflib.unified_diff(story(before), story(after), n=0, lineterm=""))[2:]
    return sum(line.startswith("+") for line in diff), sum(line.startswith("-") for line in diff)


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines that two files share ("equal"), or that differ ("replace", "delete", "insert")."""

    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    before_number: int  # of the first line, counted from 1
    after_number: int


def diff(before: str, after: str, docstring: bool = False) -> list[Hunk]:
    """What changes from one level's train.py to another's, in order; all lines of both are in it.

    Without `docstring` the module docstrings, which every level has its own, and what follows them blank are left out.
    """
    skip, skip_after = (0, 0) if docstring else (docstring_end(before), docstring_end(after))
    ours, theirs = source(before)[skip:], source(after)[skip_after:]
    # Blank lines are alike everywhere and would tie together what does not belong together.
    opcodes = difflib.SequenceMatcher(lambda line: not line.strip(), ours, theirs, autojunk=False).get_opcodes()
    return [
        Hunk(kind, tuple(ours[i1:i2]), tuple(theirs[j1:j2]), skip + i1 + 1, skip_after + j1 + 1)
        for kind, i1, i2, j1, j2 in opcodes
    ]


def unified(before: str, after: str) -> str:
    """The diff of two levels as text, in the form of `diff -u`, without the module docstrings."""
    skip = {"-": docstring_end(before), "+": docstring_end(after)}
    ours, theirs = source(before)[skip["-"] :], source(after)[skip["+"] :]
    names = (f"{before}/train.py", f"{after}/train.py")
    lines = list(difflib.unified_diff(ours, theirs, *names, n=CONTEXT, lineterm=""))
    for i, line in enumerate(lines):
        if line.startswith("@@ "):  # say the lines' numbers in the whole files
            lines[i] = re.sub(r"([-+])(\d+)", lambda found: found[1] + str(int(found[2]) + skip[found[1]]), line)
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m common.ladder", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("diff", help="what changes from one level to another")
    command.add_argument("before", metavar="LEVEL", help="such as 01")
    command.add_argument("after", metavar="LEVEL", help="such as 02")
    command.add_argument(
        "--html",
        nargs="?",
        type=Path,
        const=Path("diff.html"),
        metavar="PATH",
        help="side by side, by default %(const)s",
    )
    options = parser.parse_args(argv)
    if options.command is None:
        from common import tour

        sys.stdout.write(tour.text(tour.look()))
        return
    from common import diffs  # which shows what this module finds

    try:
        before, after = named(options.before), named(options.after)
    except ValueError as error:
        command.error(str(error))
    if options.html:
        options.html.write_text(diffs.page([before, after]))
        print(f"Written: {options.html}")
    else:
        sys.stdout.write(diffs.terminal(before, after, colour=diffs.wants_colour(sys.stdout)))


if __name__ == "__main__":
    main()
