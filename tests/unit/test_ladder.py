"""The levels are short, and each differs from the one before it by little."""

import difflib

import pytest

from common import ladder


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
