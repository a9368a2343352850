"""The levels and scripts of the ladder, and functions that read and load them.

A *level* is a folder of the ladder. A *rung* is a script to climb to: each level's train.py, under the level's name,
train_fsdp.py and train_mesh.py of level 02, whose ranks share the network too, and train_full.py of levels 03 and 04,
which add what a long training needs. Whatever reads or loads a script takes a rung.
"""

import ast
import importlib.util
from itertools import pairwise
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTED = ("02_ddp_raw", "03_accelerate", "04_trainer")
FSDP = "02_ddp_raw/train_fsdp"
MESH = "02_ddp_raw/train_mesh"
SHARDED = (FSDP, MESH)  # each rank keeps a part of the network
FULL = "03_accelerate/train_full"


def levels() -> list[str]:
    """The names of the levels, in the order of the climb."""
    return sorted(path.parent.name for path in ROOT.glob("0?_*/train.py"))


def rungs() -> list[str]:
    """The names of the scripts: the levels in the order of the climb, then those beside them."""
    return [*levels(), *SHARDED, *with_checkpoints()]


def is_distributed(rung: str) -> bool:
    """Is the script for several processes?"""
    return level_of(rung) in DISTRIBUTED


def with_checkpoints() -> list[str]:
    """The rungs that take --mixed-precision, --gradient-accumulation-steps and --checkpoint-dir."""
    return [f"{path.parent.name}/train_full" for path in sorted(ROOT.glob("0?_*/train_full.py"))]


def templates() -> list[str]:
    """The names of the scripts to copy, one a level."""
    return [f"{path.parent.name}/template" for path in sorted(ROOT.glob("0?_*/template.py"))]


def steps() -> list[tuple[str, str]]:
    """The pairs whose difference a reader goes through: each level and the next, each level and what is beside it."""
    longer = [(level_of(rung), rung) for rung in with_checkpoints()]
    return [*pairwise(levels()), (level_of(FSDP), FSDP), (FSDP, MESH), *longer]


def level_of(rung: str) -> str:
    """The level to which a rung belongs: "03_accelerate" for "03_accelerate/train_full"."""
    return rung.partition("/")[0]


def short_name(rung: str) -> str:
    """The name in a table of a script that is beside a level's: "02 fsdp" for "02_ddp_raw/train_fsdp"."""
    level, _, name = rung.partition("/")
    return f"{level[:2]} {name.removeprefix('train_')}"


def script(rung: str) -> Path:
    level, _, name = rung.partition("/")
    return ROOT / level / f"{name or 'train'}.py"


def file_name(rung: str) -> str:
    """The rung's script as a path from the repository's root, such as "03_accelerate/train_full.py"."""
    path = script(rung).relative_to(ROOT)
    return path.as_posix()


def named(text: str) -> str:
    """The rung that `text` names: the beginning of a level, or of a level and a script, such as "03/train_full.py".

    "fsdp" and "mesh" name level 02's train_fsdp.py and train_mesh.py.

    Raises:
        ValueError: if no rung, or more than one, is named so.
    """
    beginning, _, name = {"fsdp": FSDP, "mesh": MESH}.get(text, text).partition("/")
    stem = name.removesuffix(".py") or "train"
    found = []
    for rung in [*rungs(), *templates()]:
        if rung.startswith(beginning) and script(rung).stem == stem:
            found.append(rung)
    if len(found) != 1:
        raise ValueError(f"{text!r} names no level: one of {', '.join(rungs())}, or the beginning of one")
    return found[0]


def load(rung: str, path: Path | None = None) -> ModuleType:
    """The rung's script, or another version of it at `path`, as a module: the folders' names are no identifiers."""
    name = "ladder_" + rung.replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, path or script(rung))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(rung: str) -> list[str]:
    return script(rung).read_text().splitlines()


def story(rung: str) -> list[str]:
    """The lines of a script that a reader has to understand: not the module docstring, not blank ones."""
    lines = source(rung)[docstring_end(rung) :]
    return [line for line in lines if line.strip()]


def docstring_end(rung: str) -> int:
    """The number of the last line of the module docstring and of the blank ones after it; 0 if there is none."""
    lines = source(rung)
    tree = ast.parse("\n".join(lines))
    if ast.get_docstring(tree) is None:
        return 0
    end = tree.body[0].end_lineno
    while not lines[end].strip():
        end += 1
    return end
