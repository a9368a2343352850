"""A GPU that may be asked about and must not be started, and jobs of the CPU that run where there is one."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class Started(AssertionError):
    """CUDA was started."""


@contextlib.contextmanager
def gpu_that_must_not_start(gpus: int = 8) -> Iterator[None]:
    """A machine with GPUs, as far as torch is asked about them; whatever would start CUDA raises Started.

    CUDA_VISIBLE_DEVICES="" hides the GPUs from processes that have not looked yet: from those that enter this block
    with it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    def start(*args: Any, **kwargs: Any) -> None:
        raise Started("CUDA is started: in a fork it cannot be, and elsewhere it takes memory of the first GPU")

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, new: Any) -> None:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, new))

        if visible:
            replace(torch.cuda, "is_available", lambda: True)
            replace(torch.cuda, "device_count", lambda: gpus)
        replace(torch.cuda, "_lazy_init", start)
        replace(torch.cuda, "is_current_stream_capturing", start)
        replace(torch.accelerator, "current_accelerator", _current_accelerator)
        replace(torch.accelerator, "current_stream", start)
        yield


def _current_accelerator(check_available: bool = False) -> torch.device | None:
    return None if check_available and not torch.cuda.is_available() else torch.device("cuda")


def step_on_the_cpu() -> float:
    """One step of AdamW; returns the parameter after it."""
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(())
    optimizer.step()
    return parameter.item()


def where_cuda_must_not_start(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a job, on a rank of a machine with GPUs."""
    with gpu_that_must_not_start():
        return function(*args, **kwargs)
