"""The processes of tests forget the states of an Accelerator between two jobs."""

import functools
import os
import sys
from collections.abc import Callable
from unittest import mock

import torch

from common.launch import LAUNCHER_THREADS
from common.process_group import leave_process_group

OURS = "common.accelerator"
THEIRS = "accelerate"
# One thread for an Accelerator: ours asks the first variable, and the original counts cores without the second.
ONE_THREAD = {LAUNCHER_THREADS: "1", "OMP_NUM_THREADS": "1"}


def forget_states() -> None:
    """Let what follows begin as in a new process: without a process group, and without an Accelerator's state.

    Ranks that are reused call it at the end of a job, and tests between two trainings. Between two tests of the core
    the fixture of tests/unit/accelerator/conftest.py calls it.
    """
    leave_process_group()
    reset_states()


def reset_states() -> None:
    """Forget the states of our Accelerator and of the original's, and keep the process group.

    Jobs with several trainings on several ranks call it between them. A second group of the same job would have the
    first one's address, where a rank that is early may still meet the store of the first.
    """
    for library in (OURS, THEIRS):
        state = sys.modules.get(f"{library}.state")
        if state is not None:  # The library has been imported here.
            state.AcceleratorState._reset_state(reset_partial_state=True)
            state.GradientState._reset_state()


def on_a_rank(job: Callable) -> Callable:
    """`job` on one thread, which its Accelerators leave it; its states are forgotten at its end.

    It is for ranks that are reused, and for tests that call it in their own process, which gets its threads back.
    """

    @functools.wraps(job)
    def run(*args, **kwargs):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with mock.patch.dict(os.environ, ONE_THREAD):
                return job(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)
            forget_states()

    return run
