"""The list of levels, the changes between them, and the views of these changes."""

import html
import io
import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest

from common import ladder
from common.ladder import alignment, html_page, scripts, small, terminal
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
    assert "\n+ " + "    print('resumed')" in terminal.diff_text("03_accelerate", ladder.FULL, colour=False)
    assert "+++ 03_accelerate/train_full.py" in ladder.unified("03_accelerate", ladder.FULL)
    assert "<code>03_accelerate/train_full.py</code>" in html_page.side_by_side(["03_accelerate", ladder.FULL])


def test_loading_a_script_runs_nothing(capsys):
    for rung in ladder.rungs():
        module = ladder.load(rung)
        assert callable(module.train)
    assert capsys.readouterr().out == ""


def test_the_story_leaves_out_the_docstring_and_blank_lines():
    story = ladder.story("00_single_gpu")
    assert story[0] == "import torch" and "" not in story


@pytest.mark.parametrize("before, after", ladder.steps())
@pytest.mark.parametrize("docstring", [False, True])
def test_the_hunks_of_a_diff_make_up_both_files_and_know_their_lines_numbers(before, after, docstring):
    hunks = ladder.diff(before, after, docstring)
    ours, theirs = ladder.source(before), ladder.source(after)
    skipped = (0, 0) if docstring else (ladder.docstring_end(before), ladder.docstring_end(after))
    assert [line for hunk in hunks for line in hunk.before] == ours[skipped[0] :]
    assert [line for hunk in hunks for line in hunk.after] == theirs[skipped[1] :]
    for hunk in hunks:
        assert (hunk.kind == "equal") == (hunk.before == hunk.after)
        assert ours[hunk.before_number - 1 :][: len(hunk.before)] == list(hunk.before)
        assert theirs[hunk.after_number - 1 :][: len(hunk.after)] == list(hunk.after)


@pytest.mark.parametrize("before, after", ladder.steps())
def test_rows_keep_every_line_in_order_and_put_alike_ones_side_by_side(before, after):
    paired = 0
    for hunk in ladder.diff(before, after):
        rows = alignment.rows(hunk)
        assert tuple(row.before for row in rows if row.before is not None) == hunk.before
        assert tuple(row.after for row in rows if row.after is not None) == hunk.after
        paired += sum(hunk.kind == "replace" and None not in (row.before, row.after) for row in rows)
    assert paired >= 1 or before == "00_single_gpu"


def test_the_words_that_changed_are_marked_and_make_up_the_line():
    row = alignment.Row("return run.result(model, totals)", "return run.result(model.module, totals)")
    left, right = alignment.marked(row)
    assert "".join(text for text, _ in left) == "return run.result(model, totals)"
    assert [text for text, changed in left if changed] == []
    assert [text for text, changed in right if changed] == [".module"]


def test_a_unified_diff_applies_to_the_file(tmp_path):
    """`patch` turns one level into the next but for the docstring, and would refuse wrong line numbers."""
    if not shutil.which("patch"):
        pytest.skip("patch is not installed")
    before, after = "02_ddp_raw", "03_accelerate"
    path = tmp_path / "train.py"
    shutil.copy(ladder.script(before), path)
    command = ["patch", "--fuzz=0", str(path)]
    done = subprocess.run(command, input=ladder.unified(before, after), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "offset" not in done.stdout, done.stdout
    patched = path.read_text().splitlines()
    assert patched[ladder.docstring_end(before) :] == ladder.source(after)[ladder.docstring_end(after) :]


@pytest.mark.parametrize("before, after", ladder.steps())
@pytest.mark.parametrize("colour", [False, True])
def test_the_terminal_shows_every_changed_line_in_80_columns(before, after, colour):
    shown = terminal.diff_text(before, after, colour)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert (plain != shown) == colour
    assert max(map(len, plain.splitlines())) <= 80
    words = "".join(line[2:] for line in plain.splitlines() if line.startswith("+ ")).replace(" ", "")
    expected = "".join("".join(hunk.after) for hunk in ladder.diff(before, after) if hunk.kind != "equal")
    assert words == expected.replace(" ", "")


def test_colour_is_for_terminals_and_for_those_who_want_it(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.wants_colour(Terminal()) and not terminal.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.wants_colour(Terminal())


def test_the_side_by_side_view_holds_every_line_of_every_level_and_marks_the_changed_ones():
    fragment = html_page.side_by_side(ladder.levels())
    sections = fragment.split("<section")[1:]
    for section, (before, after) in zip(sections, pairwise(LEVELS), strict=True):
        for side, level in (("before", before), ("after", after)):
            cells = re.findall(rf'<div class="{side}"><i>(\d+)</i><code[^>]*>(.*?)</code></div>', section)
            assert [int(number) for number, _ in cells] == list(range(1, len(ladder.source(level)) + 1))
            assert [html.unescape(re.sub("<[^>]*>", "", code)) for _, code in cells] == ladder.source(level)
    assert any("<ins>" in section for section in sections)
    changed = re.findall(r'<div class="row changed">(?:(?!<div class="row).)*nn.DataParallel\(model', sections[0])
    assert len(changed) == 1


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


def test_the_terminal_is_used_as_far_as_it_goes():
    narrow, wide = (terminal.diff_text("01_data_parallel", "02_ddp_raw", False, width) for width in (60, 200))
    assert max(map(len, narrow.splitlines()[3:])) <= 60 < max(map(len, wide.splitlines())) <= 200


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*diff.html cannot be written: No such file or directory"):
        main(["diff", "01", "02", "--html", str(tmp_path / "no" / "diff.html")])
