"""A process that sees no GPU, on a machine that may have some."""

import os

import torch


def hide_gpus() -> None:
    """Make torch see no GPU in this process from now on.

    Since torch 2.14 an optimizer asks at each step whether a CUDA graph is being recorded, wherever a GPU is visible,
    also if its tensors are on the CPU. That starts CUDA: it takes hundreds of MB of the first GPU, and it raises in a
    fork of a process that has asked the CUDA runtime for its GPUs.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch asks the driver, not the CUDA runtime
    torch.cuda._cached_device_count = 0  # a fork of a process that has used a GPU has inherited another number
