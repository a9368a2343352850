"""The device of this machine that a user names, and a process that sees no GPU."""

import os
import re

import torch

from common.errors import fail


def find_device(text: str, one_process: bool) -> torch.device:
    """The device that `text` names. A GPU has an index if `one_process`; else each rank chooses its own later.

    Raises:
        UserError: for a text other than auto, cpu, cuda and, if `one_process`, cuda:N; for a device that is not there.
    """
    match = re.fullmatch("auto|cpu|cuda(:(?P<index>[0-9]{1,9}))?", text)
    if match is None:
        fail(f"argument --device: {text!r} is not auto, cpu or cuda; CUDA_VISIBLE_DEVICES says which GPUs to use")
    gpus = torch.cuda.device_count()
    if text == "cpu" or (text == "auto" and gpus == 0):
        return torch.device("cpu")
    index = match["index"]
    if index is not None and not one_process:
        advice = f"to choose among them set CUDA_VISIBLE_DEVICES={index}"
        fail(f"argument --device: {text!r}: each process takes the GPU of its local rank; {advice}")
    if gpus == 0:
        fail(f"argument --device: {text!r} cannot be used here (torch finds no GPU); try --device cpu")
    if not one_process:
        return torch.device("cuda")
    number = int(index or 0)
    if number >= gpus:
        fail(f"argument --device: {text!r} cannot be used here (GPUs 0 to {gpus - 1} are visible)")
    return torch.device("cuda", number)


def hide_gpus() -> None:
    """Make torch see no GPU in this process from now on.

    Since torch 2.14 an optimizer asks at each step whether a CUDA graph is being recorded, wherever a GPU is visible,
    also if its tensors are on the CPU. That starts CUDA: it takes hundreds of MB of the first GPU, and it raises in a
    fork of a process that has asked the CUDA runtime for its GPUs.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch asks the driver, not the CUDA runtime
    torch.cuda._cached_device_count = 0  # a fork of a process that has used a GPU has inherited another number
