"""The checkers accept a right solution, and say of each wrong one which idea is wrong in it."""

import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

from common import exercises
from common.exercises import page, ring_all_reduce, stage
from common.ladder.__main__ import main
from tests.unit.exercises.wrong_solutions import BACKWARD_OF_EACH, SENT_BY_HAND, WRONG

SOLUTIONS = Path(__file__).with_name("solutions")


def solution(name: str, folder: Path, old: str = "", new: str = "") -> Path:
    """A file with the right solution of an exercise, or with a change to it."""
    text = (SOLUTIONS / f"{name}.py").read_text()
    assert old in text, f"the right solution of {name} has changed"
    path = folder / "solution.py"
    path.write_text(text.replace(old, new) if old else text)
    return path


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_right_solution_passes(name, tmp_path):
    assert exercises.check(name, solution(name, tmp_path)) == []


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
    "average_gradients: in the background": (
        "dist.all_reduce(parameter.grad)",
        "dist.all_reduce(parameter.grad, async_op=True).wait()",
    ),
    "buckets: the parts of the message become the gradients": (
        "parameter.grad.copy_(part.view_as(parameter))",
        "parameter.grad = part.view_as(parameter)",
    ),
    "ring_all_reduce: receives in the background": ("dist.recv(arrived, left)", "dist.irecv(arrived, left).wait()"),
    "ring_all_reduce: a copy of the own chunk is added to what arrives": (
        """        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived
""",
        """        own = mine.clone()
        dist.recv(mine, left)
        mine += own
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
    "accumulate: clears the gradients first": (
        f"""    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
{BACKWARD_OF_EACH}    optimizer.step()
    optimizer.zero_grad()
""",
        f"""    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
{BACKWARD_OF_EACH}    optimizer.step()
""",
    ),
    "accumulate: sends by hand": (
        BACKWARD_OF_EACH,
        SENT_BY_HAND.replace("parameter.grad)", "parameter.grad, op=dist.ReduceOp.AVG)"),
    ),
    "loss_scaler: the greatest of the flags": (
        "dist.all_reduce(overflows)",
        "dist.all_reduce(overflows, op=dist.ReduceOp.MAX)",
    ),
    "prepare: the order of rank 0 for all": (
        """        return DataLoader(
            obj.dataset,
            batch_size=obj.batch_size // dist.get_world_size(),
            sampler=DistributedSampler(obj.dataset, shuffle=shuffle),
""",
        """        import torch

        order = torch.randperm(len(obj.dataset)) if shuffle else torch.arange(len(obj.dataset))
        dist.broadcast(order, src=0)
        return DataLoader(
            obj.dataset,
            batch_size=obj.batch_size // dist.get_world_size(),
            sampler=order[dist.get_rank() :: dist.get_world_size()].tolist(),
""",
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


@pytest.mark.slow
@pytest.mark.parametrize("title", UNUSUAL)
def test_an_unusual_right_solution_passes(title, tmp_path):
    name = title.partition(":")[0]
    assert exercises.check(name, solution(name, tmp_path, *UNUSUAL[title])) == []


EQUAL_PARTS = """from torch.optim import AdamW

from common.small.zero import ZeRO1 as OfEqualParts


class ZeRO1(OfEqualParts):
    def __init__(self, module, **settings):
        super().__init__(module, AdamW, **settings)
"""


@pytest.mark.slow
def test_a_right_solution_may_cut_each_parameter_into_equal_parts(tmp_path):
    path = tmp_path / "solution.py"
    path.write_text(EQUAL_PARTS)
    assert exercises.check("zero1", path) == []


BLOCKING_SENDS = """import torch
import torch.distributed as dist


def exchange(sent, received):
    rank = dist.get_rank()
    right = (rank + 1) % dist.get_world_size()
    left = (rank - 1) % dist.get_world_size()
    if rank == 0:
        dist.send(sent, right)
        dist.recv(received, src=left)
    else:
        dist.recv(received, left)
        dist.send(sent, dst=right)


def ring_all_reduce(tensor):
    world_size = dist.get_world_size()
    chunks = tensor.tensor_split(world_size)
    number = dist.get_rank()
    for step in range(2 * (world_size - 1)):
        following = (number - 1) % world_size
        arrived = torch.empty_like(chunks[following])
        exchange(chunks[number].clone(), arrived)
        if step < world_size - 1:
            arrived += chunks[following]
        chunks[following].copy_(arrived)
        number = following
"""


@pytest.mark.slow
def test_a_right_ring_may_send_and_receive_one_after_the_other(tmp_path):
    path = tmp_path / "solution.py"
    path.write_text(BLOCKING_SENDS)
    assert exercises.check("ring_all_reduce", path) == []


@pytest.fixture
def little_patience(monkeypatch):
    """Half of the seconds that a learner's solution has, because several of the wrong ones wait for their end."""
    monkeypatch.setattr(stage, "SECONDS", 4)


@pytest.mark.slow
@pytest.mark.parametrize("title", WRONG)
def test_a_wrong_solution_is_told_which_idea_is_wrong(title, tmp_path, little_patience):
    wrong = WRONG[title]
    found = exercises.check(wrong.exercise, solution(wrong.exercise, tmp_path, wrong.old, wrong.new))
    assert found and wrong.idea in found[0], found


def test_every_exercise_rejects_three_wrong_solutions_or_more():
    rejected = Counter(wrong.exercise for wrong in WRONG.values())
    assert all(rejected[name] >= 3 for name in exercises.NAMES), rejected


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "average_gradients" else pytest.mark.slow) for name in exercises.NAMES],
)
def test_a_starter_has_the_task_and_the_command_and_its_gap_is_no_error(name):
    exercise = exercises.module(name)
    assert f"python -m common.ladder check {name} my_{name}.py" in exercises.task(name)
    assert (exercises.STARTERS.parents[2] / exercise.READ).is_file()
    [finding] = exercises.check(name, exercises.starter(name))
    assert f"of {name}.py is still a gap: " in finding


# The pool of ranks is started anew after each of these.
BEGINNING = "    for parameter in"


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, said",
    [
        (
            "dist.all_reduce(parameter.grad)",
            "dist.all_reduce(gradient)",
            "line 8 of solution.py raised NameError: name",
        ),
        (BEGINNING, f"    assert dist.get_rank() == 0, 'no'\n{BEGINNING}", "on rank 1 line 6 of solution.py raised"),
        ("def average_gradients", "def average", "solution.py defines no average_gradients"),
        ("model: nn.Module", "", "Does it have the signature of the starter file?"),
        ("-> None:", "-> None", "line 5 of solution.py raised SyntaxError"),
        (BEGINNING, f"    import sys; sys.exit(3)\n{BEGINNING}", "line 6 of solution.py raised SystemExit"),
        (BEGINNING, f"    import os; os._exit(3)\n{BEGINNING}", "a process has ended, and not by an exception"),
    ],
    ids=["error", "error on rank 1", "name", "signature", "syntax", "exit", "end"],
)
def test_a_solution_that_raises_is_told_where(old, new, said, tmp_path):
    [finding] = exercises.check("average_gradients", solution("average_gradients", tmp_path, old, new))
    assert said in finding


HANGS = {
    "a rank that has returned": (
        "if parameter.grad is not None:",
        "if parameter.grad is not None and dist.get_rank() == 0:",
        "rank 0: line 8 of solution.py: dist.all_reduce(parameter.grad)\n    rank 1: has returned\n"
        "    a rank that has returned does not answer",
    ),
    "a loop": (
        BEGINNING,
        f"    while dist.get_rank() == 1: pass\n{BEGINNING}",
        "rank 1: line 6 of solution.py: while dist.get_rank() == 1: pass\n    rank 1 waits for nobody: a loop",
    ),
    "different calls": (
        BEGINNING,
        f"    if dist.get_rank() == 1:\n        dist.barrier()\n{BEGINNING}",
        "rank 1: line 7 of solution.py: dist.barrier()\n    they wait for each other: all ranks must call the same",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("hang", HANGS)
def test_ranks_that_do_not_return_are_named_with_their_lines_in_time(hang, tmp_path, little_patience):
    old, new, said = HANGS[hang]
    began = time.monotonic()
    [finding] = exercises.check("average_gradients", solution("average_gradients", tmp_path, old, new))
    assert said in finding, finding
    assert time.monotonic() - began < 20


def test_all_ranks_that_are_in_a_loop_are_named():
    computing = stage.Place("solution.py", 1, waits=False)
    assert stage._hang([computing, computing], None).endswith(
        "ranks 0 and 1 wait for nobody: a loop does not end there"
    )


def test_ranks_that_wait_for_their_sends_are_told_to_receive_before(tmp_path):
    path = tmp_path / "solution.py"
    path.write_text("handle.wait()\n")
    places = [stage.Place(str(path), 1)] * 3
    assert "begin to send, then receive, and wait for the send after that" in ring_all_reduce.why_it_hangs(places)


def warnings_seen(_: str) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn("of torch, about a line of the checker", stacklevel=1)
    return len(seen)


def test_warnings_of_torch_do_not_stand_before_the_findings(tmp_path):
    assert warnings_seen("") == 1
    assert stage.on_ranks(1, warnings_seen, tmp_path / "solution.py") == [0]


def test_the_command_line_says_the_task_the_findings_and_the_verdict(tmp_path, capsys):
    path = solution("average_gradients", tmp_path)
    main(["check", "average_gradients", str(path)])
    said = capsys.readouterr().out
    assert said.startswith("PASSED: average_gradients\n\n  The same numbers as NaiveDDP")
    assert f"Next: python -m common.ladder check {exercises.following('average_gradients')}\n" in said
    with pytest.raises(SystemExit) as ended:
        main(["check", "average_gradients", str(exercises.starter("average_gradients"))])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("NOT YET: average_gradients\n\n  line ")
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
    assert page.PAGE.read_text() == page.text(), "python -m common.exercises.page writes it anew"
