"""The levels are short, and each differs from the one before it by little."""

import difflib
import html
import io
import re
import shutil
import subprocess

import pytest

from common import diffs, ladder


def test_levels_stand_in_order():
    assert ladder.levels()[:3] == ["00_single_gpu", "01_data_parallel", "02_ddp_raw"]


@pytest.mark.parametrize("before, after, most", [("00", "01", 10), ("01", "02", 60)])
def test_a_step_of_the_ladder_is_small(before, after, most):
    names = {level[:2]: level for level in ladder.levels()}
    assert 0 < sum(ladder.changed_lines(names[before], names[after])) <= most


def test_level_03_replaces_at_most_60_lines_of_level_02():
    """A line that takes another's place counts once."""
    matcher = difflib.SequenceMatcher(None, ladder.story("02_ddp_raw"), ladder.story("03_accelerate"), autojunk=False)
    replaced = [max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal"]
    assert 0 < sum(replaced) <= 60
    assert len(ladder.story("03_accelerate")) <= 85


def test_no_train_py_is_over_110_lines():
    for level in ladder.levels():
        assert len(ladder.script(level).read_text().splitlines()) <= 110, level


def test_loading_a_level_runs_nothing(capsys):
    for level in ladder.levels():
        module = ladder.load(level)
        assert callable(module.train) and callable(module.main)
    assert capsys.readouterr().out == ""


def test_the_story_leaves_out_the_docstring_and_blank_lines():
    story = ladder.story("00_single_gpu")
    assert story[0] == "import torch" and "" not in story


NEIGHBOURS = [
    ("00_single_gpu", "01_data_parallel"),
    ("01_data_parallel", "02_ddp_raw"),
    ("02_ddp_raw", "03_accelerate"),
]
NEIGHBOURS.append(("03_accelerate", "04_trainer"))


@pytest.mark.parametrize("before, after", NEIGHBOURS)
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


@pytest.mark.parametrize("before, after", NEIGHBOURS)
def test_rows_keep_every_line_in_order_and_put_alike_ones_side_by_side(before, after):
    paired = 0
    for hunk in ladder.diff(before, after):
        rows = diffs.rows(hunk)
        assert tuple(row.before for row in rows if row.before is not None) == hunk.before
        assert tuple(row.after for row in rows if row.after is not None) == hunk.after
        paired += sum(hunk.kind == "replace" and None not in (row.before, row.after) for row in rows)
    assert paired >= 1


def test_the_words_that_changed_are_marked_and_make_up_the_line():
    left, right = diffs.words(diffs.Row("return run.result(model, totals)", "return run.result(model.module, totals)"))
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


@pytest.mark.parametrize("before, after", NEIGHBOURS)
@pytest.mark.parametrize("colour", [False, True])
def test_the_terminal_shows_every_changed_line_in_80_columns(before, after, colour):
    shown = diffs.terminal(before, after, colour)
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
    assert diffs.wants_colour(Terminal()) and not diffs.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not diffs.wants_colour(Terminal())


def test_the_side_by_side_view_holds_every_line_of_every_level_and_marks_the_changed_ones():
    fragment = diffs.side_by_side_html(ladder.levels())
    sections = fragment.split("<section")[1:]
    assert len(sections) == 4
    for section, (before, after) in zip(sections, NEIGHBOURS, strict=True):
        for side, level in (("before", before), ("after", after)):
            cells = re.findall(rf'<div class="{side}"><i>(\d+)</i><code[^>]*>(.*?)</code></div>', section)
            assert [int(number) for number, _ in cells] == list(range(1, len(ladder.source(level)) + 1))
            assert [html.unescape(re.sub("<[^>]*>", "", code)) for _, code in cells] == ladder.source(level)
    assert "<ins>.module</ins>" in sections[0]
    changed = re.findall(r'<div class="row changed">(?:(?!<div class="row).)*data_parallel\(model, args', sections[0])
    assert len(changed) == 1


def test_the_command_line_names_levels_by_their_number(capsys, tmp_path, monkeypatch):
    ladder.main(["diff", "00", "01"])
    printed = capsys.readouterr().out
    assert printed.startswith("00_single_gpu → 01_data_parallel: ") and "\x1b" not in printed
    ladder.main(["diff", "00", "01_data_parallel/"])
    assert capsys.readouterr().out == printed
    monkeypatch.chdir(tmp_path)
    ladder.main(["diff", "03", "04", "--html"])
    assert "04_trainer/train.py" in (tmp_path / "diff.html").read_text()
    with pytest.raises(SystemExit) as stopped:
        ladder.main(["diff", "0", "7"])
    assert stopped.value.code == 2 and "'0' names no level" in capsys.readouterr().err
