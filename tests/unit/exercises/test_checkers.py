"""The checkers accept a right solution, and say of each wrong one which idea is wrong in it."""

import time
from pathlib import Path

import pytest

from common import exercises
from common.exercises import stage
from common.ladder.__main__ import main
from tests.unit.exercises.wrong_solutions import BACKWARD_OF_EACH, SENT_BY_HAND, WRONG

SOLUTIONS = Path(__file__).with_name("solutions")
PAGE = Path(exercises.__file__).with_name("README.md")


def solution(name: str, folder: Path, old: str = "", new: str = "") -> Path:
    """A file with the right solution of an exercise, or with a change to it."""
    text = (SOLUTIONS / f"{name}.py").read_text()
    assert old in text, f"the right solution of {name} has changed"
    path = folder / "solution.py"
    path.write_text(text.replace(old, new) if old else text)
    return path


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_right_solution_passes(name, tmp_path):
    assert exercises.check(name, solution(name, tmp_path)) is None


# A change to the right solution of an exercise, which stays right.
UNUSUAL = {
    "overlapped_ddp: futures": (
        "dist.all_reduce(parameter.grad, async_op=True))",
        "dist.all_reduce(parameter.grad, async_op=True).get_future().then(lambda future: future.value()))",
    ),
    "overlapped_ddp: weights averaged by all-reduces": (
        "dist.broadcast(parameter.detach(), src=0)",
        "dist.all_reduce(parameter.detach(), op=dist.ReduceOp.AVG)",
    ),
    "overlapped_ddp: waited for twice": ("handle.wait()", "handle.wait(), handle.wait()"),
    "overlapped_ddp: ranks wait in other orders": (
        "in self.handles:",
        "in self.handles[:: -1 if dist.get_rank() == 0 else 1]:",
    ),
    "average_gradients: in the background": (
        "dist.all_reduce(parameter.grad)",
        "dist.all_reduce(parameter.grad, async_op=True).wait()",
    ),
    "buckets: the parts of the message become the gradients": (
        "parameter.grad.copy_(part.view_as(parameter))",
        "parameter.grad = part.view_as(parameter)",
    ),
    "ring_all_reduce: receives in the background": ("dist.recv(arrived, left)", "dist.irecv(arrived, left).wait()"),
    "ring_all_reduce: rank 0 sends first, and the others receive first": (
        """        handle = dist.isend(chunks[(rank - step) % world_size], right)
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived
        handle.wait()
""",
        """        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        if rank > 0:
            dist.recv(arrived, left)
        dist.send(chunks[(rank - step) % world_size], right)
        if rank == 0:
            dist.recv(arrived, left)
        mine += arrived
""",
    ),
    "exact_evaluation: the rest on the last rank": (
        "own = dataset[dist.get_rank() :: dist.get_world_size()]",
        """rank, size = dist.get_rank(), len(dataset) // dist.get_world_size()
    own = dataset[rank * size : (rank + 1) * size if rank < dist.get_world_size() - 1 else None]""",
    ),
    "exact_evaluation: waited for by a future": (
        "dist.all_reduce(counts)",
        "dist.all_reduce(counts, async_op=True).get_future().wait()",
    ),
    "sampler: a generator function": ("return iter(order", "yield from (order"),
    "accumulate: sends by hand": (BACKWARD_OF_EACH, SENT_BY_HAND),
    "accumulate: clears the gradients first": (
        f"{BACKWARD_OF_EACH}    optimizer.step()\n    optimizer.zero_grad()\n",
        f"""        if number == 1:
            optimizer.zero_grad()
{BACKWARD_OF_EACH}    optimizer.step()
""",
    ),
    "loss_scaler: the greatest of the flags": (
        "dist.all_reduce(overflows)",
        "dist.all_reduce(overflows, op=dist.ReduceOp.MAX)",
    ),
    "prepare: the order of rank 0 for all": (
        "            sampler=DistributedSampler(obj.dataset, shuffle=shuffle),\n",
        "            sampler=share_of_order(len(obj.dataset), shuffle),\n",
    ),
    "zero1: each gradient is reduced to its owner": (
        """        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
""",
        """        for number, parameter in enumerate(self.parameters):
            dist.reduce(parameter.grad, dst=number % dist.get_world_size())
""",
    ),
}
SHARE_OF_ORDER = """

def share_of_order(size, shuffle):
    import torch

    order = torch.randperm(size) if shuffle else torch.arange(size)
    dist.broadcast(order, src=0)
    return order[dist.get_rank() :: dist.get_world_size()].tolist()
"""
EQUAL_PARTS = """from torch.optim import AdamW

from common.small.zero import ZeRO1 as OfEqualParts


class ZeRO1(OfEqualParts):
    def __init__(self, module, **settings):
        super().__init__(module, AdamW, **settings)
"""


@pytest.mark.slow
@pytest.mark.parametrize("title", UNUSUAL)
def test_an_unusual_right_solution_passes(title, tmp_path):
    name = title.partition(":")[0]
    path = solution(name, tmp_path, *UNUSUAL[title])
    path.write_text(path.read_text() + SHARE_OF_ORDER)
    assert exercises.check(name, path) is None


@pytest.mark.slow
def test_a_right_solution_may_cut_each_parameter_into_equal_parts(tmp_path):
    path = tmp_path / "solution.py"
    path.write_text(EQUAL_PARTS)
    assert exercises.check("zero1", path) is None


@pytest.fixture
def little_patience(monkeypatch):
    """Half of the seconds that a learner's solution has, because several of the wrong ones wait for their end."""
    monkeypatch.setattr(stage, "SECONDS", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, old, new, idea",
    [pytest.param(name, *row, id=f"{name}: {row[-1]}") for name, rows in WRONG.items() for row in rows],
)
def test_a_wrong_solution_is_told_which_idea_is_wrong(name, old, new, idea, tmp_path, little_patience):
    found = exercises.check(name, solution(name, tmp_path, old, new))
    assert found and idea in found, found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "average_gradients" else pytest.mark.slow) for name in exercises.NAMES],
)
def test_a_starter_has_the_task_and_the_command_and_its_gap_is_no_error(name):
    assert f"python -m common.ladder check {name} my_{name}.py" in exercises.task(name)
    assert f"of {name}.py: raise NotImplementedError(" in exercises.check(name, exercises.starter(name))


# The pool of ranks is started anew after each of these.
BEGINNING = "    for parameter in"
SUM = "dist.all_reduce(parameter.grad)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, said",
    [
        (
            SUM,
            "dist.all_reduce(gradient)",
            "line 8 of solution.py: dist.all_reduce(gradient)\n    raised NameError: name",
        ),
        (BEGINNING, f"    assert dist.get_rank() == 0, 'no'\n{BEGINNING}", "raised AssertionError: no, on rank 1"),
        ("def average_gradients", "def average", "solution.py defines no average_gradients"),
        ("model: nn.Module", "", "Does it take, and return, what the starter file says?"),
        ("-> None:", "-> None", "raised SyntaxError"),
        (BEGINNING, f"    import sys; sys.exit(3)\n{BEGINNING}", "raised SystemExit"),
        (BEGINNING, f"    import os; os._exit(3)\n{BEGINNING}", "a process has ended, and not by an exception"),
        (
            "if parameter.grad is not None:",
            "if parameter.grad is not None and dist.get_rank() == 0:",
            f"rank 0: line 8 of solution.py: {SUM}\n    rank 1: has returned\n    all ranks must call the same",
        ),
        (
            BEGINNING,
            f"    while dist.get_rank() == 1: pass\n{BEGINNING}",
            "rank 1: line 6 of solution.py: while dist.get_rank() == 1: pass",
        ),
        (
            BEGINNING,
            f"    if dist.get_rank() == 1:\n        dist.barrier()\n{BEGINNING}",
            "rank 1: line 7 of solution.py: dist.barrier()",
        ),
    ],
    ids=[
        "error",
        "error on rank 1",
        "name",
        "signature",
        "syntax",
        "exit",
        "end",
        "has returned",
        "loop",
        "other calls",
    ],
)
def test_a_solution_that_does_not_come_to_its_end_is_told_where_and_in_time(old, new, said, tmp_path, little_patience):
    began = time.monotonic()
    assert said in exercises.check("average_gradients", solution("average_gradients", tmp_path, old, new))
    assert time.monotonic() - began < 20


def test_the_command_line_says_the_task_the_findings_and_the_verdict(tmp_path, capsys):
    path = solution("average_gradients", tmp_path)
    main(["check", "average_gradients", str(path)])
    said = capsys.readouterr().out
    assert said.startswith("PASSED: average_gradients\n\n  The same numbers as NaiveDDP")
    assert f"Next: python -m common.ladder check {exercises.following('average_gradients')}\n" in said
    with pytest.raises(SystemExit) as ended:
        main(["check", "average_gradients", str(exercises.starter("average_gradients"))])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("NOT YET: average_gradients\n\n  on 2 ranks: this line is still a gap: ")
    main(["check", "--list"])
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(exercises.NAMES, lines[: len(exercises.NAMES)], strict=True):
        assert line.startswith(name) and line.endswith(exercises.title(name))
    main(["check", "accumulate"])
    said = capsys.readouterr().out
    assert said.startswith(exercises.task("accumulate"))
    assert "Read first: common/small/ddp/README.md" in said and "starters/accumulate.py my_accumulate.py" in said


@pytest.mark.parametrize("path", [[], ["solution.py"]], ids=["without a file", "with a file"])
def test_an_exercise_that_does_not_exist_is_an_error(path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "juggling", *path])
    assert ended.value.code == 2
    assert "'juggling' is no exercise" in capsys.readouterr().err


def test_the_page_lists_the_exercises():
    page = PAGE.read_text()
    for number, name in enumerate(exercises.NAMES, start=1):
        exercise = exercises.module(name)
        title = exercises.title(name).removesuffix(".")
        read = f"[{exercise.READ}](../../{exercise.READ})"
        assert f"| {number} | [{name}](starters/{name}.py) | {title} | {exercise.MINUTES} | {read} |\n" in page
        assert (PAGE.parents[2] / exercise.READ).is_file()
