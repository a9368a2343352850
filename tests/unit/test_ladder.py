"""The list of levels, the changes between them, and the views of these changes."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from common import ladder
from common.ladder import small, unified_diff
from common.ladder.__main__ import main
from tests.jobs import run_to_end
from tests.levels import FULL, code_lines

COMPARED = [
    *pairwise(ladder.LEVELS),
    *pairwise(["02_ddp_raw", *ladder.SHARDED]),
    *zip(ladder.LEVELS[3:], ladder.WITH_CHECKPOINTS, strict=True),
]


def test_the_lists_name_all_scripts_in_order():
    assert sorted(ladder.SCRIPTS) == sorted(names_of("train*.py"))
    assert list(ladder.LEVELS) == names_of("train.py")
    assert list(ladder.WITH_CHECKPOINTS) == names_of("train_full.py")
    assert list(ladder.TEMPLATES) == names_of("template.py")


def names_of(pattern: str) -> list[str]:
    paths = [path.relative_to(ladder.ROOT) for path in sorted(ladder.ROOT.glob(f"0?_*/{pattern}"))]
    return [str(path.with_suffix("")).removesuffix("/train") for path in paths]


def test_scripts_are_named_by_numbers_folders_and_paths():
    for text in ("03", "03_accelerate", "03/", "03_accelerate/train.py", "03/train"):
        assert ladder.find_script(text) == "03_accelerate"
    for text in ("03/train_full", "03_accelerate/train_full.py"):
        assert ladder.find_script(text) == FULL
    assert ladder.find_script("fsdp") == ladder.find_script("02/train_fsdp.py") == ladder.FSDP
    with pytest.raises(argparse.ArgumentTypeError, match="'02/train_full' names no script, or several"):
        ladder.find_script("02/train_full")


def test_loading_a_script_runs_nothing(capsys):
    for name in ladder.SCRIPTS:
        module = ladder.load(name)
        assert callable(module.train)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("before, after", COMPARED)
def test_a_diff_turns_one_script_into_the_other_whatever_lines_it_pairs(before, after):
    shown = unified_diff(before, after).splitlines()[2:]
    old = Counter(code_lines(before))
    old.subtract(line[1:] for line in shown if line.startswith("-") and line[1:].strip())
    old.update(line[1:] for line in shown if line.startswith("+") and line[1:].strip())
    assert +old == Counter(code_lines(after)) and min(old.values()) >= 0


def test_the_command_line_names_levels_by_their_number(capsys):
    main(["diff", "00", "01"])
    printed = capsys.readouterr().out
    assert printed.startswith("00_single_gpu → 01_data_parallel: ")
    main(["diff", "00", "01_data_parallel/"])
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_a_level_runs_on_the_small_ones(tmp_path):
    argv = ["small", "03", "--dataset", "synthetic", "--train-samples", "96", "--eval-samples", "30"]
    argv += ["--processes", "2", "--json", str(tmp_path / "r.json")]
    done = run_to_end([sys.executable, "-m", "common.ladder", *argv])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("03_accelerate: 2 × gloo on cpu")
    assert json.loads((tmp_path / "r.json").read_text())["evaluated"] == 30


def test_all_that_a_level_imports_has_a_small_counterpart():
    for level, whole in (("02_ddp_raw", "torch.nn.parallel"), ("03_accelerate", "common.accelerator")):
        module = small.load_small(level)
        imported = [line for line in ladder.lines_below_docstring(level) if line.startswith(f"from {whole}")]
        names = [name for line in imported for name in line.partition(" import ")[2].split(", ")]
        assert names and all(vars(module)[name].__module__.startswith("common.small.") for name in names)


@pytest.mark.slow
def test_a_package_that_was_installed_without_the_levels_says_so(tmp_path):
    """`pip install .` copies `common`; the levels stay in the repository."""
    shutil.copytree(ladder.ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "common.ladder"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: no level lies in {tmp_path}") and done.stderr.count("\n") == 1
