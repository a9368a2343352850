"""Record the steps of a level's own script.

A level does not name its phases, so the functions that it calls in them are wrapped while it is recorded.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.profiler import record_function

from benchmarks.harness import level_runs
from benchmarks.harness.lanes.record_steps import record
from benchmarks.harness.lanes.spans import BACKWARD, COPIES, FORWARD, SENDING, RecordedStep
from common.model import BasicNet
from common.small import data_parallel

# What a level calls in a step, and the phase that this is.
CALLS = (
    (BasicNet, "forward", FORWARD),
    (Tensor, "backward", BACKWARD),
    (data_parallel, "replicate", COPIES),
    (data_parallel, "scatter", COPIES),
    (data_parallel, "gather", COPIES),
)


def record_level(script: str, argv: list[str]) -> list[list[RecordedStep]]:
    """The steps of a level's own script but for the first, of each device that this process computes on.

    Its messages are called "sending" and not all-reduces, because FSDP gathers and scatters too.
    """
    with ExitStack() as stack:
        for owner, name, phase in CALLS:
            stack.enter_context(patch.object(owner, name, _named(phase, getattr(owner, name))))
        return record(partial(level_runs.run_level, script, argv), SENDING)


def _named(phase: str, function: Callable) -> Callable:
    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return function(*args, **kwargs)

    return named
