"""What a process remembers of an Accelerator, and how a test makes it forget."""

import importlib

from common.processes import leave_process_group

OURS = "common.accelerator"
THEIRS = "accelerate"


def forget_states(library: str = OURS) -> None:
    """Let what follows begin as in a new process: without a process group, and without a state of this library.

    Ranks that are reused call it at the end of a job, and tests between two trainings. Between two tests of the core
    the fixture of tests/unit/accelerator/conftest.py calls it.
    """
    state = importlib.import_module(f"{library}.state")
    leave_process_group()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
