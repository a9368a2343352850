"""The checkers accept a right solution, and say of each wrong one what is wrong with it."""

import textwrap
from pathlib import Path

import pytest

from common.ladder import exercises
from common.ladder.__main__ import main

RIGHT = {
    "average_gradients": """
        import torch.distributed as dist

        def average_gradients(model):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
    """,
    "accumulate": """
        import contextlib
        import torch.nn.functional as F

        def train_step(model, optimizer, micro_batches):
            for number, (images, targets) in enumerate(micro_batches, 1):
                last = number == len(micro_batches)
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = F.nll_loss(model(images), targets)
                    (loss / len(micro_batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "exact_evaluation": """
        import torch
        import torch.distributed as dist

        def accuracy(model, dataset):
            own = dataset[dist.get_rank()::dist.get_world_size()]
            counts = torch.zeros(2, dtype=torch.float64)
            for image, label in own:
                counts[0] += model(image[None]).argmax(dim=1).item() == label
                counts[1] += 1
            dist.all_reduce(counts)
            return (counts[0] / counts[1]).item()
    """,
}

OWN_SHARE = "own = dataset[dist.get_rank()::dist.get_world_size()]"
PADDED_SHARE = """from torch.utils.data import DistributedSampler
    own = [dataset[index] for index in DistributedSampler(dataset, shuffle=False)]"""
WHOLE_SHARE = """share = len(dataset) // dist.get_world_size()
    own = dataset[dist.get_rank() * share:][:share]"""
GRADIENT_FOR_ALL = """if parameter.grad is None:
            parameter.grad = parameter.detach() * 0
        if True:"""

# The exercise, what is replaced in the right solution, by what, and a part of what the checker says.
WRONG = {
    "a sum": ("average_gradients", "parameter.grad /= dist.get_world_size()", "pass", "divide by the world size"),
    "two ranks taken for granted": ("average_gradients", "dist.get_world_size()", "2", "on 3 ranks"),
    "nothing done": ("average_gradients", "dist.all_reduce(parameter.grad)", "continue", "still has its own gradient"),
    "weights averaged": (
        "average_gradients",
        "dist.all_reduce(parameter.grad)",
        "parameter.data *= 2",
        "the weights have",
    ),
    "a gradient for all": (
        "average_gradients",
        "if parameter.grad is not None:",
        GRADIENT_FOR_ALL,
        "the unused layer has got a gradient",
    ),
    "rank 0 alone": (
        "average_gradients",
        "if parameter.grad is not None:",
        "if parameter.grad is not None and dist.get_rank() == 0:",
        "it hung",
    ),
    "another name": (
        "average_gradients",
        "def average_gradients",
        "def average",
        "defines no function average_gradients",
    ),
    "a mistake": ("average_gradients", "dist.all_reduce(parameter.grad)", "dist.all_reduce(gradient)", "NameError"),
    "sent each time": (
        "accumulate",
        "nullcontext() if last else model.no_sync()",
        "nullcontext()",
        "sent 3 times in a step",
    ),
    "never sent": (
        "accumulate",
        "contextlib.nullcontext() if last else model.no_sync()",
        "model.no_sync()",
        "no gradient was sent",
    ),
    "not divided": ("accumulate", "(loss / len(micro_batches))", "loss", "the weights on rank 0 are not those"),
    "old gradients kept": ("accumulate", "optimizer.zero_grad()", "pass", "the weights on rank 0 are not those"),
    "padded": ("exact_evaluation", OWN_SHARE, PADDED_SHARE, "some were evaluated twice"),
    "tail dropped": ("exact_evaluation", OWN_SHARE, WHOLE_SHARE, "some were left out"),
    "own share only": ("exact_evaluation", "dist.all_reduce(counts)", "pass", "the ranks return different numbers"),
    "all on every rank": (
        "exact_evaluation",
        "dataset[dist.get_rank()::dist.get_world_size()]",
        "dataset",
        "evaluated twice",
    ),
}
QUICK = {"a sum", "sent each time", "padded"}


def right_solution(folder: Path, name: str) -> Path:
    path = folder / "solution.py"
    path.write_text(textwrap.dedent(RIGHT[name]))
    return path


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_right_solution_passes(name, tmp_path):
    assert exercises.check(name, right_solution(tmp_path, name)) == []


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in WRONG]
)
def test_a_wrong_solution_is_told_what_is_wrong(mistake, tmp_path):
    name, wrong, instead, said = WRONG[mistake]
    path = right_solution(tmp_path, name)
    text = path.read_text()
    assert wrong in text
    path.write_text(text.replace(wrong, instead))
    found = exercises.check(name, path)
    assert said in " ".join(found), found


def test_the_command_line_says_the_task_the_findings_and_the_verdict(tmp_path, capsys):
    path = right_solution(tmp_path, "average_gradients")
    main(["check", "average_gradients", str(path)])
    assert capsys.readouterr().out == "PASSED: average_gradients\n"
    path.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["check", "average_gradients", str(path)])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith(
        "NOT YET: average_gradients\n  on 2 ranks it raised: rank 0: SolutionFailed"
    )
    main(["check"])
    said = capsys.readouterr().out
    assert all(exercises.task(name).splitlines()[0] in said for name in exercises.NAMES)


@pytest.mark.parametrize("path", [[], ["solution.py"]], ids=["without a file", "with a file"])
def test_an_exercise_that_does_not_exist_is_an_error(path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "juggling", *path])
    assert ended.value.code == 2
    assert "'juggling' is no exercise" in capsys.readouterr().err
