"""Every classic mistake shows, is caught, and is no longer found once it is removed."""

import difflib
import functools
import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from common import ladder, pitfalls
from common.pitfalls.__main__ import answers, main, run_all
from common.pitfalls.examine import Verdict, examine, reports
from common.pitfalls.excerpt import excerpt

FOLDER = Path(pitfalls.__file__).parent
COLUMNS = 80


@pytest.fixture(scope="module")
def verdict():
    """The Verdict on a pitfall, by name; each is run once."""
    return functools.cache(lambda name: examine(pitfalls.module_name(name)))


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_the_detector_fires_on_the_mistake_and_is_silent_without_it(name, verdict):
    assert verdict(name).finding
    assert verdict(name).false_alarm is None
    assert verdict(name).wrong != verdict(name).right


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("batch_size_per_process", "50 steps an epoch", "100 steps an epoch"),
        ("set_epoch_forgotten", "orders: 1 in 3 epochs", "orders: 3 in 3 epochs"),
        ("schedule_too_fast", "lr 0.00 at half time", "lr 0.05 at half time"),
        ("uneven_inputs", "hangs, ended after 2 s", "7 batches"),
        ("collective_on_rank_0", "rank 0: hangs, rank 1: sum 300.25", "sum 600"),
        ("padded_evaluation", "10002 of 10000", "10000 of 10000"),
        ("every_rank_saves", "holds rank 1's mean", "holds rank 0's mean"),
        ("prefixed_keys", "0 of 4 loaded", "4 of 4 loaded"),
    ],
)
def test_the_numbers_are_those_that_one_expects(name, wrong, right, verdict):
    assert (verdict(name).wrong, verdict(name).right) == (wrong, right)


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_the_symptom_is_the_one_that_shows(name, verdict):
    shown = verdict(name).wrong
    seen = "hang" if "hangs" in shown else "error" if shown.startswith("error") else "silent"
    assert pitfalls.symptom(name) == seen


def test_numbers_of_ranks_that_differ_say_whose_they_are_and_what_is_in_them(verdict):
    first, second = re.findall(r"calls (.*?) in line \d+", verdict("collective_on_rank_0").finding)
    assert (first, second) == ("dist.all_reduce(loss)", "dist.all_reduce(correct)")
    for name in ("metrics_not_gathered", "batchnorm_statistics"):
        assert verdict(name).wrong.count(" and ") == 1 and "rank" not in verdict(name).wrong


def test_a_hang_is_told_rank_by_rank(verdict):
    assert verdict("uneven_inputs").finding == "no end: rank 0 in step 4, rank 1 in the barrier after the loop"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("without_a_mistake", "MISSED: the detector is silent about the mistake"),
        ("without_a_correction", "FALSE ALARM about the correction: epoch 1 has the order of epoch 0"),
    ],
)
def test_a_mistake_that_was_removed_and_one_in_the_correction_are_complaints(capsys, name, complaint):
    assert run_all([pitfalls.module_name("set_epoch_forgotten")]) is True
    assert "\nCAUGHT: 1 of 1 mistakes" in capsys.readouterr().out
    assert run_all([f"tests.unit.broken_pitfalls.{name}"]) is False
    printed = capsys.readouterr().out
    assert complaint in printed and "\nNOT ALL CAUGHT: 0 of 1 mistakes" in printed


# This module is a pitfall itself, one whose mistake is not an outcome but a crash.
WORLD_SIZE = 2


def wrong():
    os._exit(7)


def right():
    raise ValueError("a bug in the pitfall")


@pytest.mark.parametrize(
    ("version", "reason"), [("wrong", "process ended with exit code 7"), ("right", "ValueError: a bug in the pitfall")]
)
def test_ranks_that_die_or_raise_are_an_error_and_the_next_pitfall_gets_new_ones(version, reason):
    with pytest.raises(RuntimeError, match=f"(?s)test_pitfalls has failed.*rank 0.*{reason}.*rank 1.*{reason}"):
        reports(__name__, version)
    assert examine(pitfalls.module_name("set_epoch_forgotten")).caught


def test_ranks_that_fail_end_the_run_with_their_traceback(monkeypatch, capsys):
    monkeypatch.setattr("common.pitfalls.__main__.module_name", lambda name: __name__)
    assert main([]) == 2
    assert re.search(r"^error: .*test_pitfalls has failed in its wrong version\n.*exit code 7", capsys.readouterr().err)


def test_the_list_has_every_file():
    tools = {"__init__", "__main__", "examine", "excerpt", "stage"}
    assert {path.stem for path in FOLDER.glob("*.py")} == {*pitfalls.NAMES, *tools}


def test_both_versions_differ_in_a_few_lines():
    for name in pitfalls.NAMES:
        pitfall = importlib.import_module(pitfalls.module_name(name))
        versions = (inspect.getsource(version).splitlines()[1:] for version in (pitfall.wrong, pitfall.right))
        changes = [line for line in difflib.ndiff(*versions) if line[0] in "+-"]
        assert 0 < len(changes) <= 8, (name, changes)


def test_what_is_printed_fits_the_terminal(capsys, verdict):
    assert main(["--list"]) == 0
    listing = capsys.readouterr().out
    for name in pitfalls.NAMES:
        assert f"{name} ({pitfalls.symptom(name)}) {pitfalls.title(name)}" in " ".join(listing.split())
        assert max(map(len, pitfalls.source(name).splitlines())) <= COLUMNS, name
        # The columns of the table: a name, the wrong number, the right one.
        assert len(name) <= 23 and len(verdict(name).wrong) <= 33 and len(verdict(name).right) <= 22
    assert max(map(len, listing.splitlines())) <= COLUMNS


def test_one_pitfall_is_shown_with_its_explanation_its_source_and_its_numbers(capsys):
    assert main(["padded_evaluation"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(pitfalls.explanation("padded_evaluation"))
    assert "def detect(loader):" in printed and printed.count(pitfalls.title("padded_evaluation")) == 1
    assert "wrong:  10002 of 10000\n    right:  10000 of 10000\n" in printed
    assert "caught: 2 samples count more than once [0, 1], 0 never" in printed
    assert max(map(len, printed.splitlines())) <= COLUMNS


def test_the_quiz_asks_before_it_shows_and_keeps_the_score(capsys, monkeypatch):
    names = ("padded_evaluation", "prefixed_keys", "set_epoch_forgotten", "different_orders")
    letters = [next(letter for letter, choice in answers(name).items() if choice == name) for name in names]
    wrong = next(letter for letter in "abcd" if letter != letters[1])
    typed = iter(["too many samples?", letters[0].upper(), wrong, "", "q"])
    before = []

    def guess(prompt: str) -> str:
        before.append(capsys.readouterr().out)
        return next(typed)

    monkeypatch.setattr("builtins.input", guess)
    monkeypatch.setattr("common.pitfalls.__main__.NAMES", (*names, *pitfalls.NAMES))
    monkeypatch.setattr("common.pitfalls.__main__.answers", answers)
    assert main(["--quiz"]) == 0
    asked, refused, answered, shown, skipped = before
    assert asked.startswith("Question 1 of 25, on 3 processes:") and "def wrong():" in asked
    assert "10002" not in asked and f"  {letters[0]}  {pitfalls.title('padded_evaluation')}" in asked
    assert refused == "'too many samples?' is none of the answers.\n"
    assert answered.startswith(f"\nRight.\n\npadded_evaluation: {pitfalls.title('padded_evaluation')}")
    assert "wrong:  10002 of 10000\n    right:  10000 of 10000" in answered
    assert "Corrected:\n\n    from common.accelerator.sampler import DistributedEvalSampler" in answered
    assert shown.startswith(f"\nIt is {letters[1]}.\n") and skipped.startswith(f"\nIt is {letters[2]}.\n")
    assert capsys.readouterr().out == "Score: 1 of 3\n"


def test_the_answers_of_a_question_are_four_with_the_right_one_and_the_same_each_time():
    for name in pitfalls.NAMES:
        assert len(set(answers(name).values())) == 4 and name in answers(name).values()
        assert answers(name) == answers(name)


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_a_question_shows_the_mistake_and_what_it_needs_and_not_the_correction(name):
    asked = excerpt(name, "wrong")
    assert "def wrong(" in asked
    assert "def right(" not in asked and "def detect(" not in asked and pitfalls.title(name) not in asked
    used = Counter(re.findall(r"\w+", asked))
    for imported in re.findall(r"import (.*)$", asked.replace("import (", ""), re.MULTILINE):
        for alias in imported.split(", "):
            assert used[alias.split()[-1].rpartition(".")[2]] >= 2, alias
    assert compile(asked, name, "exec") and max(map(len, asked.splitlines())) <= COLUMNS


@pytest.mark.parametrize("name", pitfalls.NAMES)
def test_an_answer_shows_the_correction_and_nothing_twice(name):
    corrected = excerpt(name, "right", but_for="wrong")
    assert "def right(" in corrected and "def wrong(" not in corrected and "def detect(" not in corrected
    assert compile(f"{excerpt(name, 'wrong')}\n{corrected}", name, "exec")


def test_the_quiz_ends_where_nobody_answers(capsys, monkeypatch):
    def end_of_input(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    assert main(["--quiz", "prefixed_keys"]) == 0
    assert "Question 1 of 1" in capsys.readouterr().out


def test_a_name_that_does_not_exist_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["padded"])
    assert "there is no pitfall padded; --list names them" in capsys.readouterr().err


def test_verdicts_need_a_finding_about_the_mistake_and_none_about_the_correction():
    assert Verdict("1", "2", "found", None).caught
    assert not Verdict("1", "2", None, None).caught
    assert not Verdict("1", "2", "found", "found").caught


def test_pitfalls_belong_to_levels_and_no_level_imports_one():
    for name in pitfalls.NAMES:
        levels = importlib.import_module(pitfalls.module_name(name)).LEVELS
        assert levels and set(levels) <= set(ladder.levels()), name
    for level in ladder.levels():
        assert "pitfalls" not in ladder.script(level).read_text()


def test_every_pitfall_is_named_on_the_page_of_one_level():
    named = []
    for level in ladder.levels():
        text = (ladder.ROOT / level / "README.md").read_text()
        listed = re.findall(r"^- \[`(\w+)`\]\(\.\./common/pitfalls/\w+\.py\)", text, re.MULTILINE)
        assert listed and set(listed) == {name for name in pitfalls.NAMES if pitfalls.place(name) == level}, level
        named += listed
    assert sorted(named) == sorted(pitfalls.NAMES)


@pytest.mark.slow
def test_all_run_as_a_program():
    command = [sys.executable, "-m", "common.pitfalls"]
    done = subprocess.run(command, cwd=ladder.ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(pitfalls.NAMES)
    assert re.search(rf"^CAUGHT: {count} of {count} mistakes, in \d+ s$", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= COLUMNS
    for name in pitfalls.NAMES:
        assert re.search(rf"^{name} .*\n    caught: ", done.stdout, re.MULTILINE), name
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(module):
        raise KeyboardInterrupt

    monkeypatch.setattr("common.pitfalls.__main__.examine", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_left_to_the_system_while_torch_is_imported(monkeypatch):
    """Some of torch's modules lose a KeyboardInterrupt, and others abort on it."""
    handlers = []
    importing = importlib.import_module
    monkeypatch.setattr("common.pitfalls.__main__.examine", lambda module: Verdict("1", "2", "found", None))

    def noting(name):
        handlers.append(signal.getsignal(signal.SIGINT))
        return importing(name)

    monkeypatch.setattr(importlib, "import_module", noting)
    before = signal.getsignal(signal.SIGINT)
    assert main([]) == 0
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == before != signal.SIG_DFL


@pytest.mark.slow
def test_ctrl_c_in_the_seconds_in_which_torch_is_imported_is_no_traceback_either():
    """A terminal sends it to all processes: the program, and those that it is starting for its ranks."""
    for seconds in (0.5, 1.5, 3):
        command = [sys.executable, "-m", "common.pitfalls"]
        with subprocess.Popen(
            command, cwd=ladder.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as program:
            time.sleep(seconds)
            os.killpg(program.pid, signal.SIGINT)
            _, errors = program.communicate(timeout=60)
        # A shell shows 130 for both: libraries may leave SIGINT to the system while they are imported.
        assert program.returncode in (130, -signal.SIGINT) and errors == "", seconds
