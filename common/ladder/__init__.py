"""The levels and scripts of the ladder, and functions that read and load them.

A *level* is a folder of the ladder, such as 02_ddp_raw. A *script* is a training in it, and its name says which:

    "02_ddp_raw"                its train.py; every level has one
    "02_ddp_raw/train_fsdp"     train_fsdp.py and train_mesh.py of level 02, in which the ranks share the network too
    "03_accelerate/train_full"  train_full.py of levels 03 and 04, which adds what a long training needs

`python -m common.ladder` shows the `diff` of two scripts, trains a level on common.small (`small`), traces a `ring`
all-reduce, and checks solutions of exercises.
"""

import argparse
import ast
import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

from common.levels import DISTRIBUTED, LEVELS, MESH, WITH_CHECKPOINTS

ROOT = Path(__file__).resolve().parents[2]
FSDP = "02_ddp_raw/train_fsdp"
SHARDED = (FSDP, MESH)  # each rank keeps a part of the network
SCRIPTS = (*LEVELS, *SHARDED, *WITH_CHECKPOINTS)
# They are copied for a network of one's own.
TEMPLATES = ("00_single_gpu/template", "02_ddp_raw/template", "03_accelerate/template", "04_trainer/template")


def runs_on_ranks(name: str) -> bool:
    """True for a script of which torchrun starts a process for each device."""
    return level_of(name) in DISTRIBUTED


def level_of(name: str) -> str:
    """The level to which a script belongs: "03_accelerate" for "03_accelerate/train_full"."""
    return name.partition("/")[0]


def short_name(name: str) -> str:
    """The name in a table of a script that is no train.py: "02 fsdp" for "02_ddp_raw/train_fsdp"."""
    level, _, file = name.partition("/")
    return f"{level[:2]} {file.removeprefix('train_')}"


def script(name: str) -> Path:
    level, _, file = name.partition("/")
    return ROOT / level / f"{file or 'train'}.py"


def find_script(text: str) -> str:
    """The name of the script that a user means by `text`, such as "03" or "03/train_full.py": a level may be cut short.

    "fsdp" and "mesh" name level 02's train_fsdp.py and train_mesh.py.

    Raises:
        argparse.ArgumentTypeError: if no script, or more than one, is named so.
    """
    whole_name = {"fsdp": FSDP, "mesh": MESH}.get(text, text)
    beginning, _, file = whole_name.partition("/")
    stem = file.removesuffix(".py") or "train"
    found = []
    for name in (*SCRIPTS, *TEMPLATES):
        if name.startswith(beginning) and script(name).stem == stem:
            found.append(name)
    if len(found) != 1:
        every = ", ".join((*SCRIPTS, *TEMPLATES))
        message = f"{text!r} names no script, or several: use one of {every}, or the beginning of one"
        raise argparse.ArgumentTypeError(message)
    return found[0]


def load(name: str, path: Path | None = None) -> ModuleType:
    """The script, or another version of it at `path`, as a module: `import` takes no name that begins with a digit."""
    module_name = "ladder_" + name.replace("/", "_")
    spec = importlib.util.spec_from_file_location(module_name, path or script(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_below_docstring(name: str) -> list[str]:
    """The lines of a script from the first statement on that is not the module docstring."""
    text = script(name).read_text()
    tree = ast.parse(text)
    first = tree.body[1] if ast.get_docstring(tree) else tree.body[0]
    return text.splitlines()[first.lineno - 1 :]


def unified_diff(before: str, after: str) -> str:
    """The diff of two scripts as text, in the form of `diff -u`, without the module docstrings and line numbers."""
    ours = lines_below_docstring(before)
    theirs = lines_below_docstring(after)
    old_path = script(before).relative_to(ROOT).as_posix()
    new_path = script(after).relative_to(ROOT).as_posix()
    text = ""
    for line in difflib.unified_diff(ours, theirs, old_path, new_path, lineterm=""):
        # Line numbers would be wrong, because the docstrings were cut off.
        text += "@@\n" if line.startswith("@@ ") else f"{line}\n"
    return text
