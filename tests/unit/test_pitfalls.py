"""Every classic mistake shows, is caught, and is no longer found once it is removed."""

import difflib
import inspect
import re
from pathlib import Path

import pytest

from common import ladder, pitfalls
from common.pitfalls import unused_parameter
from common.pitfalls.__main__ import answers, main, show_mistake
from common.pitfalls.stage import Verdict, examine
from common.process_group import process_group
from common.processes import ranks

FOLDER = Path(pitfalls.__file__).parent
COLUMNS = 80


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_the_detector_fires_on_the_mistake_and_is_silent_without_it(name):
    verdict = examine(name)
    assert verdict.finding and verdict.false_alarm is None
    assert verdict.hung == (pitfalls.symptom(name) == "hang")


def two_steps() -> None:
    with process_group():
        model = unused_parameter.wrong()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            unused_parameter.step(model)


def test_the_mistake_that_is_an_error_is_one():
    assert [name for name in pitfalls.NAMES if pitfalls.symptom(name) == "error"] == ["unused_parameter"]
    ranks(2).run(two_steps)


def test_a_verdict_needs_a_finding_about_the_mistake_and_none_about_the_correction():
    assert Verdict("found", None, False).caught
    assert not Verdict(None, None, False).caught and not Verdict("found", "found", False).caught


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


def test_one_pitfall_is_shown_with_its_explanation_its_source_and_what_catches_it(capsys):
    assert main(["padded_evaluation"]) == 0
    printed = capsys.readouterr().out
    finding = "caught: 2 samples count more than once [0, 1], 0 never"
    for part in (pitfalls.load("padded_evaluation").__doc__, "def wrong():", "def right():", finding):
        assert printed.count(part) == 1


def test_all_are_run_and_counted(capsys, monkeypatch):
    monkeypatch.setattr("common.pitfalls.__main__.NAMES", ("prefixed_keys",))
    assert main([]) == 0
    assert capsys.readouterr().out.endswith("\nCAUGHT: 1 of 1 mistakes\n")


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
    assert main(["--quiz"]) == 0
    asked, again, answered, missed = before
    assert "count more" not in asked and f"  {letters[0]}  {pitfalls.title('padded_evaluation')}" in asked
    assert again == "" and "count more" in answered and "score 1\n" in answered
    assert f"it is {letters[1]}" in missed and "score 1\n" in missed


def test_every_pitfall_is_named_on_the_page_of_one_level(capsys):
    assert {path.stem for path in FOLDER.glob("*.py")} == {*pitfalls.NAMES, "__init__", "__main__", "stage"}
    named = []
    for level in ladder.levels():
        text = (ladder.ROOT / level / "README.md").read_text()
        listed = re.findall(r"^- \[`(\w+)`\]\(\.\./common/pitfalls/\w+\.py\)", text, re.MULTILINE)
        assert set(listed) == {name for name in pitfalls.NAMES if pitfalls.place(name) == level}, level
        named += listed
    assert sorted(named) == sorted(pitfalls.NAMES)
    assert main(["--list"]) == 0
    assert all(f"{name} ({pitfalls.symptom(name)})" in capsys.readouterr().out for name in pitfalls.NAMES[:1])
