"""Exercises in code, and the check of a solution: on real processes, against code of this repository or of torch.

The task is the docstring of `starters/NAME.py`, which has gaps where the learner writes. The checker is the module
NAME of this package, with

    reference()                     on each rank: the numbers of our own code, or of torch's
    attempt(solution, traffic)      on each rank: those of the learner's file, which is loaded as the module `solution`;
                                    `traffic` has the messages that it has sent
    check(actual, expected)         raises a Mistake if the numbers are wrong; the lists have what `attempt` and
                                    `reference` returned, by rank

`runner.check_solution` runs them on all ranks, `traffic` observes the messages, and `compare` compares numbers.
"""

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Exercise(NamedTuple):
    """The time that an exercise takes, the page to read first, and the code of ours that does the same."""

    minutes: int
    read: str
    same_as: str


DDP_PAGE = "common/small/ddp/README.md"
LEVEL_02 = "02_ddp_raw/README.md"
EXERCISES = {  # in the order of the climb
    "average_gradients": Exercise(10, LEVEL_02, "NaiveDDP (common/small/ddp/naive.py)"),
    "overlapped_ddp": Exercise(25, DDP_PAGE, "OverlappedDDP (common/small/ddp/overlapped.py)"),
    "ring_all_reduce": Exercise(40, LEVEL_02, "the small ring (common/small/ring.py)"),
    "sampler": Exercise(15, LEVEL_02, "DistributedEvalSampler (common/eval_sampler.py)"),
    "exact_evaluation": Exercise(15, LEVEL_02, "one device"),
    "accumulate": Exercise(15, DDP_PAGE, "one device, with all samples in one batch"),
    "zero1": Exercise(30, "02_ddp_raw/MEMORY_AND_ZERO.md", "ZeRO1 (common/small/zero/zero1.py)"),
    "prepare": Exercise(25, "03_accelerate/README.md", "one device (common/small/accelerator.py has a `prepare`)"),
}
NAMES = tuple(EXERCISES)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def starter(name: str) -> Path:
    return Path(__file__).with_name("starters") / f"{name}.py"


def task(name: str) -> str:
    """The text of the exercise, the docstring of its starter file."""
    return ast.get_docstring(ast.parse(starter(name).read_text())) or ""


def title(name: str) -> str:
    return task(name).partition("\n")[0]


def following(name: str) -> str | None:
    number = NAMES.index(name) + 1
    return NAMES[number] if number < len(NAMES) else None
