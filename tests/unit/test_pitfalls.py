"""Every classic mistake shows, is caught, and is no longer found once it is removed."""

import difflib
import inspect
import re
from pathlib import Path

import pytest

from common import ladder, pitfalls
from common.pitfalls.__main__ import main, show_mistake
from common.pitfalls.runner import Trace, Verdict, examine, run_on_rank
from common.processes import RankFailed, ranks

FOLDER = Path(pitfalls.__file__).parent
COLUMNS = 80


# Hangs take their time-out each. One of them is quick.
HANGS = [name for name in pitfalls.NAMES if pitfalls.PITFALLS[name].symptom == "hang" and name != "uneven_inputs"]
OTHERS = [name for name in pitfalls.NAMES if name not in HANGS]


@pytest.mark.parametrize("name", [*OTHERS, *(pytest.param(name, marks=pytest.mark.slow) for name in HANGS)])
def test_the_detector_fires_on_the_mistake_and_is_silent_without_it(name):
    verdict = examine(name)
    assert verdict.finding and verdict.false_alarm is None
    symptom = pitfalls.PITFALLS[name].symptom
    assert verdict.hung == (symptom == "hang")
    assert ("Expected to have finished reduction" in verdict.finding) == (symptom == "error")


def raises_at_once(trace: Trace) -> None:
    raise RuntimeError("no collective, but a wrong shape")


def run_with_an_error(name: str, folder: Path) -> None:
    pitfalls.load(name).wrong = raises_at_once
    run_on_rank(name, "wrong", folder)


def test_an_error_before_the_time_is_over_is_no_hang(tmp_path):
    with pytest.raises(RankFailed, match="no collective, but a wrong shape"):
        ranks(2, on_cpu=True).run(run_with_an_error, "uneven_inputs", tmp_path)


@pytest.mark.parametrize(
    "verdict, code, text",
    [
        (Verdict("late", None, False), 0, "    caught: late\n"),
        (Verdict(None, None, False), 1, "    NOT CAUGHT: the check missed the mistake\n"),
        (Verdict("late", "early", False), 1, "    NOT CAUGHT: the check complains about the correction: early\n"),
    ],
)
def test_the_exit_code_says_whether_each_detector_was_right(verdict, code, text, monkeypatch, capsys):
    monkeypatch.setattr("common.pitfalls.__main__.examine", lambda name: verdict)
    assert main([]) == code
    caught = len(pitfalls.NAMES) if code == 0 else 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"\nCAUGHT: {caught} of {len(pitfalls.NAMES)} mistakes\n")
    assert printed.count(text) == len(pitfalls.NAMES)


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_both_versions_differ_in_a_few_short_lines(name, capsys):
    pitfall = pitfalls.load(name)
    versions = (inspect.getsource(version).splitlines()[1:] for version in (pitfall.wrong, pitfall.right))
    changes = [line for line in difflib.ndiff(*versions) if line[0] in "+-"]
    assert 0 < len(changes) <= 8
    show_mistake(name)
    shown = capsys.readouterr().out
    assert "def wrong(" in shown and "def right(" not in shown and pitfalls.title(name) not in shown
    assert "import " not in shown and not re.search(r"\bh(a|u)ng", shown)
    assert max(map(len, inspect.getsource(pitfall).splitlines())) <= COLUMNS


def test_a_pitfall_is_shown_with_its_explanation_and_what_catches_it(capsys):
    assert main(["forward_through_module"]) == 0
    printed = capsys.readouterr().out
    helper = "def largest_difference(model: nn.Module)"
    finding = "caught: the ranks' gradients differ by up to "
    for part in (pitfalls.load("forward_through_module").__doc__, "def wrong():", "def right():", helper, finding):
        assert printed.count(part) == 1


def test_the_quiz_shows_the_mistake_before_the_answer(capsys, monkeypatch):
    typed = iter(["too many samples?", "q"])
    before = []

    def guess(prompt: str) -> str:
        before.append(capsys.readouterr().out)
        return next(typed)

    monkeypatch.setattr("builtins.input", guess)
    monkeypatch.setattr("common.pitfalls.__main__.NAMES", ("padded_evaluation", "set_epoch_forgotten"))
    assert main(["--quiz"]) == 0
    asked, answered = before
    assert "def wrong():" in asked and "count more" not in asked
    assert "count more" in answered and "Question 2 of 2" in answered
    typed = iter(["q"])
    assert main(["--quiz", "set_epoch_forgotten"]) == 0
    assert "Question 1 of 1" in before[-1] and "epochs.append(list(sampler))" in before[-1]


def test_every_pitfall_is_named_on_the_page_of_one_level():
    others = {"__init__", "__main__", "gradients", "runner"}
    assert {path.stem for path in FOLDER.glob("*.py")} == {*pitfalls.NAMES, *others}
    named = []
    for level in ladder.LEVELS:
        text = (ladder.ROOT / level / "README.md").read_text()
        listed = re.findall(r"^- \[`(\w+)`\]\(\.\./common/pitfalls/\w+\.py\)", text, re.MULTILINE)
        assert set(listed) == {name for name in pitfalls.NAMES if pitfalls.PITFALLS[name].level == level}, level
        named += listed
    assert sorted(named) == sorted(pitfalls.NAMES)


def test_the_list_names_every_pitfall_and_its_symptom(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} ({pitfalls.PITFALLS[name].symptom})" in printed for name in pitfalls.NAMES)
