"""The list of levels, how to load them, and what changes between them."""

import ast
import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTED = ("02_ddp_raw", "03_accelerate", "04_trainer")


def levels() -> list[str]:
    """The names of the levels, in the order of the climb."""
    return sorted(path.parent.name for path in ROOT.glob("0?_*/train.py"))


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
    text = script(level).read_text()
    lines = text.splitlines()
    first = ast.parse(text).body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines[first.lineno - 1 : first.end_lineno] = []
    return [line for line in lines if line.strip()]


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """How many lines of the story one level adds to the other, and how many it removes."""
    diff = list(difflib.unified_diff(story(before), story(after), n=0, lineterm=""))[2:]
    return sum(line.startswith("+") for line in diff), sum(line.startswith("-") for line in diff)
