"""All that is written for readers: the pages, the docstrings of modules, and the commands in them.

on a page                             what holds                         by
------------------------------------  ---------------------------------  ------------------------------------
commands, also those of docstrings    their programs take them           test_commands
docstrings                            each module has one                test_commands
what a command prints                 the command prints it              test_failures, test_one_step
answers of the exercises              each number is computed            test_exercises
tables of the collectives             each number is counted             test_collectives
diffs, lists, tables of measurements  made from scripts and records      test_generated
some numbers and findings in the text computed, or recorded              test_records
links, files, tests                   they are there                     test_links
the notebook, files for a cluster     they run, or start what they say   test_notebook, test_cluster
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from common import ladder
from tests.jobs import run_to_end


def name(path: Path) -> str:
    return str(path.relative_to(ladder.ROOT))


def files_of_the_project() -> list[Path]:
    """The files that git tracks; without git, those outside of folders such as .venv, but for .github."""
    if (ladder.ROOT / ".git").exists() and shutil.which("git"):
        listing = ["git", "ls-files"]
        listed = subprocess.run(listing, cwd=ladder.ROOT, capture_output=True, text=True, check=True).stdout
        files = [ladder.ROOT / line for line in listed.splitlines()]
        return sorted(file for file in files if file.exists())
    hidden = re.compile(r"/\.(?!github/)")
    return sorted(path for path in ladder.ROOT.rglob("*.*") if not hidden.search(f"/{name(path)}"))


FILES = files_of_the_project()
PAGES = [file for file in FILES if file.suffix == ".md"]
FOLDERS = [*ladder.ROOT.glob("0?_*"), ladder.ROOT / "common", ladder.ROOT / "benchmarks"]
MODULES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
PROGRAM = r"(?:torchrun -|pytest |python -m (?:common|benchmarks)|python \S+\.py)"
# "    OMP_NUM_THREADS=1 python 00_single_gpu/train.py --lr 0.1  # an explanation", or " &" in its place.
ON_A_LINE = re.compile(rf"^(?:    )?(?:[A-Z_]+=\S+ )*({PROGRAM}.*?)(?:  .*| &)?$", re.MULTILINE)
# "start `torchrun --nproc-per-node 2 02_ddp_raw/train.py` on each machine"
IN_BACKTICKS = re.compile(rf"`({PROGRAM}[^`]+)`")
# What a command leaves to its reader: "pytest tests/…", "python NAME.py".
PLACEHOLDER = re.compile(r"[…<|]|\bNAME\b")
# A command, an empty line, and a block that shows what the command prints.
OUTPUT = re.compile(r"^    ([^\n]*)\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[list[str]]:
    """The commands that start Python or pytest on a page or in a module's docstring, as lists of words."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    text = re.sub(r"\\\n\s*", "", text)  # A long command goes on on the next line.
    unfolded = " ".join(text.split())
    found = [*ON_A_LINE.findall(text), *IN_BACKTICKS.findall(unfolded)]
    return [shlex.split(command, comments=True) for command in found if not PLACEHOLDER.search(command)]


def run(command: list[str]) -> subprocess.CompletedProcess:
    """A command as a reader starts it in the root, with the environment of this Python on the path."""
    folder = os.path.dirname(sys.executable)
    return run_to_end(command, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")


def section(level: str, title: str, page: str = "README.md") -> str:
    text = (ladder.ROOT / level / page).read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def outputs(page: Path) -> dict[str, str]:
    return dict(OUTPUT.findall(page.read_text()))


def table_rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text, but for the heads."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|---"):
            rows.pop()  # The row above it is the head.
        elif line.startswith("| "):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows
