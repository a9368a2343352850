"""The number of GPUs that this process may use, and a way to hide them from it."""

import os

import torch

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch asks the driver, not the CUDA runtime


def visible_gpus() -> int:
    """The number of GPUs that this process may use. It can fork others afterwards, as a notebook does.

    torch does not start the CUDA runtime for it, after which no forked process could use a GPU.
    Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#poison-fork-in-multiprocessing
    """
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if before is None:
            del os.environ[_NVML_CHECK]
        else:
            os.environ[_NVML_CHECK] = before


def hide_gpus() -> None:
    """Make torch see no GPU in this process from now on.

    Since torch 2.14 an optimizer asks at each step whether a CUDA graph is being recorded, wherever a GPU is visible,
    also if its tensors are on the CPU. That starts CUDA: it takes hundreds of MB of the first GPU, and it raises in a
    fork of a process that has asked the CUDA runtime for its GPUs.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[_NVML_CHECK] = "1"
    torch.cuda._cached_device_count = 0  # a fork of a process that has used a GPU has inherited another number
