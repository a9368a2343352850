"""The list of levels, the changes between them, and the views of these changes."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from common import ladder
from common.ladder import html_page, scripts, small
from common.ladder.__main__ import main

LEVELS = ["00_single_gpu", "01_data_parallel", "02_ddp_raw", "03_accelerate", "04_trainer"]


@pytest.fixture(params=[False, True], ids=["without train_full.py", "with train_full.py"])
def with_train_full(request, tmp_path, monkeypatch):
    """A copy of the levels in which level 03 has a second script, or has none."""
    for level in LEVELS:
        (tmp_path / level).mkdir()
        shutil.copy(ladder.script(level), tmp_path / level)
    if request.param:
        lines = ladder.source("03_accelerate")
        longer = [*lines[:-2], "    print('resumed')", *lines[-2:]]
        (tmp_path / "03_accelerate" / "train_full.py").write_text("\n".join(longer) + "\n")
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    return request.param


def test_levels_and_rungs_stand_in_order(with_train_full):
    full = [ladder.FULL] if with_train_full else []
    assert ladder.levels() == LEVELS
    assert ladder.with_checkpoints() == full
    assert ladder.rungs() == [*LEVELS, *full]
    assert ladder.steps() == [*pairwise(LEVELS), *(("03_accelerate", rung) for rung in full)]


def test_rungs_are_named_by_numbers_folders_and_paths(with_train_full):
    for text in ("03", "03_accelerate", "03/", "03_accelerate/train.py", "03/train"):
        assert ladder.named(text) == "03_accelerate"
    if not with_train_full:
        with pytest.raises(ValueError, match="'03/train_full' names no level"):
            ladder.named("03/train_full")
        return
    for text in ("03/train_full", "03_accelerate/train_full.py"):
        assert ladder.named(text) == ladder.FULL
    assert ladder.file_name(ladder.FULL) == "03_accelerate/train_full.py"
    assert ladder.changed_lines("03_accelerate", ladder.FULL) == (1, 0)
    assert "+++ 03_accelerate/train_full.py" in ladder.unified("03_accelerate", ladder.FULL)


def test_loading_a_script_runs_nothing(capsys):
    for rung in ladder.rungs():
        module = ladder.load(rung)
        assert callable(module.train)
    assert capsys.readouterr().out == ""


def test_the_story_leaves_out_the_docstring_and_blank_lines():
    story = ladder.story("00_single_gpu")
    assert story[0] == "import torch" and "" not in story


@pytest.mark.parametrize("before, after", ladder.steps())
def test_a_diff_has_all_lines_of_both_scripts_and_shows_those_that_change(before, after):
    hunks = ladder.diff(before, after)
    for side, rung in (("before", before), ("after", after)):
        lines = [line for hunk in hunks for line in getattr(hunk, side)]
        assert lines == ladder.source(rung)[ladder.docstring_end(rung) :]
    assert all((hunk.kind == "equal") == (hunk.before == hunk.after) for hunk in hunks)
    # What is shown turns one text into the other, whatever lines it pairs.
    shown = ladder.unified(before, after).splitlines()[2:]
    old = Counter(ladder.story(before))
    old.subtract(line[1:] for line in shown if line.startswith("-") and line[1:].strip())
    old.update(line[1:] for line in shown if line.startswith("+") and line[1:].strip())
    assert +old == Counter(ladder.story(after)) and min(old.values()) >= 0


def test_a_terminal_gets_colour_and_whoever_does_not_want_it_none(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    printed = []
    for no_colour in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_colour)
        monkeypatch.setattr(sys, "stdout", Terminal())
        main(["diff", "01", "02"])
        printed.append(sys.stdout.getvalue())
    assert printed[0] != printed[1] == re.sub(r"\x1b\[\d*m", "", printed[0])


def test_the_side_by_side_view_holds_every_changed_line_of_every_step():
    sections = html_page.side_by_side(ladder.levels()).split("<section")[1:]
    steps = list(pairwise(ladder.levels()))
    for section, (before, after) in zip(sections, steps, strict=True):
        shown = html.unescape(re.sub("<[^>]*>", "", section))
        for hunk in ladder.diff(before, after):
            if hunk.kind != "equal":
                assert all(line.strip() in shown for line in hunk.before + hunk.after)


def test_the_command_line_names_levels_by_their_number(capsys, tmp_path, monkeypatch):
    main(["diff", "00", "01"])
    printed = capsys.readouterr().out
    assert printed.startswith("00_single_gpu → 01_data_parallel: ") and "\x1b" not in printed
    main(["diff", "00", "01_data_parallel/"])
    assert capsys.readouterr().out == printed
    monkeypatch.chdir(tmp_path)
    main(["diff", "03", "04", "--html"])
    assert "04_trainer/train.py" in (tmp_path / "diff.html").read_text()
    with pytest.raises(SystemExit) as stopped:
        main(["diff", "0", "7"])
    assert stopped.value.code == 2 and "'0' names no level" in capsys.readouterr().err


RUN_SMALL = ["run", "03", "--small", "--dataset", "synthetic", "--train-samples", "96", "--eval-samples", "30"]


@pytest.mark.slow
def test_a_level_runs_on_the_small_ones(tmp_path):
    argv = [*RUN_SMALL, "--processes", "2", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(
        [sys.executable, "-m", "common.ladder", *argv], capture_output=True, text=True, timeout=240, cwd=ladder.ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("03_accelerate: 2 × gloo on cpu")
    assert json.loads((tmp_path / "r.json").read_text())["evaluated"] == 30


def test_the_small_script_differs_in_imports_only():
    for rung in small.IMPORTS:
        whole = ladder.script(rung).read_text().splitlines()
        changed = [line for line in small.small_source(rung).splitlines() if line not in whole]
        assert changed and all(line.startswith("from common.small.") for line in changed)


def test_what_cannot_run_on_the_small_ones_is_said(capsys):
    for argv, message in (
        (["run", "04", "--small"], "04_trainer has no small counterpart: one of 02_ddp_raw, 03_accelerate"),
        (["diff", "00", "01", "--small"], "unrecognized arguments: --small"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*diff.html cannot be written: No such file or directory"):
        main(["diff", "01", "02", "--html", str(tmp_path / "no" / "diff.html")])
