"""The GPUs that a process sees: how many, and none where it computes on the CPU only."""

import contextlib
import os
from collections.abc import Iterator

import torch

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch asks the driver, not the CUDA runtime


def visible_gpus() -> int:
    """The number of GPUs that this process may use. It can be asked in a notebook that will fork processes."""
    with _without_starting_cuda():
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def _without_starting_cuda() -> Iterator[None]:
    """Within the block torch does not start the CUDA runtime, after which no forked process could use a GPU.

    Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#poison-fork-in-multiprocessing
    """
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before


def hide_gpus() -> None:
    """Let this process take the machine for one without GPUs from now on.

    Since torch 2.14 an optimizer asks at each step whether a CUDA graph is being recorded, wherever a GPU is visible,
    also if its tensors are on the CPU. That starts CUDA: it takes hundreds of MB of the first GPU, and it raises in a
    fork of a process that has asked the CUDA runtime for its GPUs.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[_NVML_CHECK] = "1"
    torch.cuda._cached_device_count = 0  # it may have another number, in a fork of a process that has used a GPU
