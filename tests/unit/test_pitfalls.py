"""Every classic mistake shows, is caught, and is no longer found once it is removed."""

import difflib
import functools
import inspect
import re
from pathlib import Path

import pytest

from common import ladder, pitfalls
from common.pitfalls.__main__ import answers, main, show_mistake
from common.pitfalls.stage import Verdict, examine

FOLDER = Path(pitfalls.__file__).parent
COLUMNS = 80
EXPECTED = {
    "batch_size_per_process": ("50 steps an epoch", "100 steps an epoch"),
    "set_epoch_forgotten": ("orders: 1 in 3 epochs", "orders: 3 in 3 epochs"),
    "accumulation_off_by_one": ("steps of 1 + 4 batches", "steps of 4 + 4 batches"),
    "forward_outside_no_sync": ("all-reduces a step: 4", "all-reduces a step: 1"),
    "schedule_too_fast": ("lr 0.00 at half time", "lr 0.05 at half time"),
    "uneven_inputs": ("hangs, ended after 2 s", "7 batches"),
    "collective_on_rank_0": ("rank 0: hangs, rank 1: sum 300.25", "sum 600"),
    "padded_evaluation": ("10002 of 10000", "10000 of 10000"),
    "every_rank_saves": ("holds rank 1's mean", "holds rank 0's mean"),
    "prefixed_keys": ("0 of 4 loaded", "4 of 4 loaded"),
}

verdict_on = functools.cache(examine)  # each pitfall is run once


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_the_detector_fires_on_the_mistake_and_is_silent_without_it(name):
    verdict = verdict_on(name)
    assert verdict.finding and verdict.false_alarm is None
    assert verdict.wrong != verdict.right
    assert (verdict.wrong, verdict.right) == EXPECTED.get(name, (verdict.wrong, verdict.right))
    seen = "hang" if "hangs" in verdict.wrong else "error" if verdict.wrong.startswith("error") else "silent"
    assert pitfalls.symptom(name) == seen
    # The columns of the table: a name, the wrong number, the right one.
    assert len(name) <= 23 and len(verdict.wrong) <= 33 and len(verdict.right) <= 22


def test_a_verdict_needs_a_finding_about_the_mistake_and_none_about_the_correction():
    assert Verdict("1", "2", "found", None).caught
    missed, false_alarm = Verdict("1", "2", None, None), Verdict("1", "2", "found", "found")
    assert not missed.caught and str(missed).startswith("MISSED")
    assert not false_alarm.caught and str(false_alarm).startswith("FALSE ALARM")


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_both_versions_differ_in_a_few_lines_that_fit_a_terminal(name, capsys):
    pitfall = pitfalls.load(name)
    versions = (inspect.getsource(version).splitlines()[1:] for version in (pitfall.wrong, pitfall.right))
    changes = [line for line in difflib.ndiff(*versions) if line[0] in "+-"]
    assert 0 < len(changes) <= 8
    show_mistake(name)
    shown = capsys.readouterr().out
    assert "def wrong(" in shown and "def right(" not in shown and pitfalls.title(name) not in shown
    assert max(map(len, inspect.getsource(pitfall).splitlines())) <= COLUMNS


def test_one_pitfall_is_shown_with_its_explanation_its_source_and_its_numbers(capsys):
    assert main(["padded_evaluation"]) == 0
    printed = capsys.readouterr().out
    for part in (pitfalls.load("padded_evaluation").__doc__, "def wrong():", "def right():", "def detect(loader):"):
        assert printed.count(part) == 1
    assert "wrong:  10002 of 10000\n    right:  10000 of 10000\n" in printed
    assert "caught: 2 samples count more than once [0, 1], 0 never" in printed


def test_the_quiz_asks_before_it_shows_and_keeps_the_score(capsys, monkeypatch):
    names = ("padded_evaluation", "set_epoch_forgotten", "different_orders")
    letters = [next(letter for letter, choice in answers(name).items() if choice == name) for name in names]
    wrong = next(letter for letter in "abcd" if letter != letters[1])
    typed = iter(["too many samples?", letters[0].upper(), wrong, "q"])
    before = []

    def guess(prompt: str) -> str:
        before.append(capsys.readouterr().out)
        return next(typed)

    monkeypatch.setattr("builtins.input", guess)
    monkeypatch.setattr("common.pitfalls.__main__.NAMES", (*names, *pitfalls.NAMES))
    monkeypatch.setattr("common.pitfalls.__main__.answers", answers)
    assert main(["--quiz"]) == 0
    asked, again, answered, missed = before
    assert "10002" not in asked and f"  {letters[0]}  {pitfalls.title('padded_evaluation')}" in asked
    assert again == "" and answered.startswith("\nRight.\n\npadded_evaluation: ") and "score 1\n" in answered
    assert missed.startswith(f"\nNo: it is {letters[1]}.\n\nset_epoch_forgotten: ") and "score 1\n" in missed


def test_the_folder_holds_the_pitfalls_and_their_stage_and_no_level_imports_one(capsys):
    assert {path.stem for path in FOLDER.glob("*.py")} == {*pitfalls.NAMES, "__init__", "__main__", "stage"}
    assert all(set(pitfalls.load(name).LEVELS) <= set(ladder.levels()) for name in pitfalls.NAMES)
    assert not any("pitfalls" in ladder.script(level).read_text() for level in ladder.levels())
    assert main(["--list"]) == 0
    assert all(f"{name} ({pitfalls.symptom(name)})" in capsys.readouterr().out for name in pitfalls.NAMES[:1])


def test_every_pitfall_is_named_on_the_page_of_one_level():
    named = []
    for level in ladder.levels():
        text = (ladder.ROOT / level / "README.md").read_text()
        listed = re.findall(r"^- \[`(\w+)`\]\(\.\./common/pitfalls/\w+\.py\)", text, re.MULTILINE)
        assert set(listed) == {name for name in pitfalls.NAMES if pitfalls.place(name) == level}, level
        named += listed
    assert sorted(named) == sorted(pitfalls.NAMES)


@pytest.mark.slow
def test_all_run_one_after_another(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    count = len(pitfalls.NAMES)
    assert printed.endswith(f"\nCAUGHT: {count} of {count} mistakes\n")
    assert max(map(len, printed.splitlines())) <= COLUMNS
