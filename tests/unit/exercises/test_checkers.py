"""The checkers accept a right solution, and name the mistake of each wrong one."""

from pathlib import Path

import pytest

from common import exercises
from common.exercises import runner
from common.exercises.compare import Mistake
from common.ladder.__main__ import main
from tests.unit.exercises.patches import RIGHT, WRONG, Patch

SOLUTIONS = Path(__file__).with_name("solutions")
PAGE = Path(exercises.__file__).with_name("README.md")


def solution(name: str, folder: Path, patch: Patch | None = None) -> Path:
    """A file with the right solution of an exercise, or with a change to it."""
    text = (SOLUTIONS / f"{name}.py").read_text()
    if patch:
        assert patch.old in text, f"the right solution of {name} has changed"
        text = text.replace(patch.old, patch.new)
    path = folder / "solution.py"
    path.write_text(text)
    return path


def mistake_of(name: str, path: Path) -> str:
    with pytest.raises(Mistake) as raised:
        runner.check_solution(name, path)
    return str(raised.value)


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_right_solution_passes(name, tmp_path):
    runner.check_solution(name, solution(name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name, patch", [(name, patch) for name, patches in RIGHT.items() for patch in patches])
def test_an_unusual_right_solution_passes(name, patch, tmp_path):
    runner.check_solution(name, solution(name, tmp_path, patch))


@pytest.mark.slow
@pytest.mark.parametrize("name, patch", [(name, patch) for name, patches in WRONG.items() for patch in patches])
def test_the_mistake_of_a_wrong_solution_is_named(name, patch, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS", 4)  # half of a learner's, because several of these wait for their end
    found = mistake_of(name, solution(name, tmp_path, patch))
    assert all(finding in found for finding in patch.findings), found


def test_a_rank_without_an_answer_in_time_is_not_said_to_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", -runner.SECONDS)
    found = mistake_of("average_gradients", solution("average_gradients", tmp_path))
    assert "a rank failed" in found and "no answer (alive)" in found and "Gloo" not in found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "average_gradients" else pytest.mark.slow) for name in exercises.NAMES],
)
def test_a_starter_has_the_task_and_the_command_and_its_gap_is_no_error(name):
    assert f"python -m common.ladder check {name} my_{name}.py" in exercises.task(name)
    found = mistake_of(name, exercises.starter(name))
    assert "this line is still a gap" in found
    assert f"of {name}.py: raise NotImplementedError(" in found


def test_the_command_line_prints_the_verdict(tmp_path, capsys):
    path = solution("average_gradients", tmp_path).rename(tmp_path / "solution")  # it may end in anything
    main(["check", "average_gradients", str(path)])
    printed = capsys.readouterr().out
    assert printed.startswith("PASSED: average_gradients\n\n  The same numbers as NaiveDDP")
    assert f"Next: python -m common.ladder check {exercises.following('average_gradients')}\n" in printed
    path = solution("average_gradients", tmp_path, Patch("parameter.grad /= dist.get_world_size()", "pass"))
    with pytest.raises(SystemExit) as ended:
        main(["check", "average_gradients", str(path)])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("NOT YET: average_gradients\n\n  on 3 ranks: ")


def test_the_command_line_lists_the_exercises(capsys):
    main(["check", "--list"])
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(exercises.NAMES, lines[: len(exercises.NAMES)], strict=True):
        assert line.startswith(name) and line.endswith(exercises.title(name))


def test_the_command_line_prints_the_task_and_where_to_begin(capsys):
    main(["check", "accumulate"])
    printed = capsys.readouterr().out
    assert printed.startswith(exercises.task("accumulate"))
    assert "Read first: common/small/ddp/README.md" in printed
    assert "starters/accumulate.py my_accumulate.py" in printed


def test_an_exercise_or_a_file_that_does_not_exist_is_an_error(capsys):
    for argv, message in ((["juggling"], "'juggling' (choose from"), (["zero1", "no.py"], "there is no file no.py")):
        with pytest.raises(SystemExit) as ended:
            main(["check", *argv])
        assert ended.value.code
        assert message in capsys.readouterr().err


def test_the_page_lists_the_exercises():
    page = PAGE.read_text()
    for number, name in enumerate(exercises.NAMES, start=1):
        exercise = exercises.EXERCISES[name]
        title = exercises.title(name).removesuffix(".")
        read = f"[{exercise.read}](../../{exercise.read})"
        assert f"| {number} | [{name}](starters/{name}.py) | {title} | {exercise.minutes} | {read} |\n" in page
        assert (PAGE.parents[2] / exercise.read).is_file()
