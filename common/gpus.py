"""A process that computes on the CPU, on a machine with GPUs."""

import os

import torch


def hide_gpus() -> None:
    """Let this process take the machine for one without GPUs from now on.

    Since torch 2.14 an optimizer asks at each step whether a CUDA graph is being recorded, wherever a GPU is visible,
    also if its tensors are on the CPU. That starts CUDA: it takes hundreds of MB of the first GPU, and it raises in a
    fork of a process that has as much as called `torch.cuda.is_available()`. CUDA_VISIBLE_DEVICES is read when CUDA is
    looked at first. Where that has happened, in a fork's parent, only another answer to torch's own question helps.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.cuda.is_available = _is_available
    torch.cuda.device_count = _device_count


def _is_available() -> bool:
    return False


def _device_count() -> int:
    return 0
