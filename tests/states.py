"""The processes of tests forget the states of an Accelerator between two jobs."""

import functools
import importlib
from collections.abc import Callable

import torch

from common.process_group import leave_process_group

OURS = "common.accelerator"
THEIRS = "accelerate"
# The package that has the Accelerator of a library with a Trainer.
CORE_OF = {"common.trainer": OURS, "transformers": THEIRS}


def forget_states(library: str = OURS) -> None:
    """Let what follows begin as in a new process: without a process group, and without a state of this library.

    Ranks that are reused call it at the end of a job, and tests between two trainings. Between two tests of the core
    the fixture of tests/unit/accelerator/conftest.py calls it.
    """
    leave_process_group()
    reset_states(library)


def reset_states(library: str = OURS) -> None:
    """The same, but in the process group that there is, which the next training uses too.

    Jobs with several trainings on several ranks call it between them. A second group of the same job would have the
    first one's address, where a rank that is early may still meet the store of the first.
    """
    core = CORE_OF.get(library, library)
    state = importlib.import_module(f"{core}.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def on_a_rank(job: Callable) -> Callable:
    """`job` for ranks that are reused: on one thread, and its states are forgotten at its end."""

    @functools.wraps(job)
    def run(*args, **kwargs):
        torch.set_num_threads(1)
        try:
            return job(*args, **kwargs)
        finally:
            forget_states()

    return run
