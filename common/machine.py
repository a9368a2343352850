"""What this machine and its launcher give to a level, and whether that is what the flags ask for."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator

import torch

from common.errors import fail

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def check_launch(script: str, device: torch.device) -> None:
    """Refuse a launch that `script` cannot use: several processes of a level of one, or level 02 without torchrun.

    Level 02 also needs a GPU for each process, or none: nccl cannot share one.

    Raises:
        UserError: after one line that says what to do.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if script in ("00_single_gpu", "01_data_parallel") and world_size > 1:
        advice = "start it with python, not torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "unset it"
        fail(f"{script} is one process, but WORLD_SIZE is {world_size}: {advice}")
    if script == "02_ddp_raw":
        if "RANK" not in os.environ:
            fail(f"{script} needs torchrun: torchrun --standalone --nproc-per-node 2 {script}/train.py")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = visible_gpus()
        if device.type == "cuda" and ranks > gpus:
            fail(f"{ranks} processes need as many GPUs, {gpus} are visible: start fewer, or add --device cpu")


def find_device(text: str, one_process: bool) -> torch.device:
    """The device that `text` names: with its index where one process chooses it, without where each rank has its own.

    Raises:
        UserError: for anything but auto, cpu, cuda and, at levels of one process, cuda:N; if it is not there; if the
            ranks of this machine are more than its GPUs.
    """
    known = re.fullmatch("auto|cpu|cuda(:(?P<index>[0-9]{1,9}))?", text)
    if known is None:
        fail(f"argument --device: {text!r} is not auto, cpu or cuda; CUDA_VISIBLE_DEVICES says which GPUs to use")
    gpus = visible_gpus()
    if text == "cpu" or (text == "auto" and gpus == 0):
        return torch.device("cpu")
    index = known["index"]
    if index is not None and not one_process:
        advice = f"to choose among them set CUDA_VISIBLE_DEVICES={index}"
        fail(f"argument --device: {text!r}: each process takes the GPU of its local rank; {advice}")
    if gpus == 0:
        fail(f"argument --device: {text!r} cannot be used here (torch finds no GPU); try --device cpu")
    if int(index or 0) >= gpus:
        fail(f"argument --device: {text!r} cannot be used here (GPUs 0 to {gpus - 1} are visible)")
    return torch.device("cuda", int(index or 0)) if one_process else torch.device("cuda")


def choose_replicas(replicas: int | None, device: torch.device) -> int:
    """The number of DataParallel's replicas: what the flag says, else the visible GPUs, at least 2.

    Raises:
        UserError: if there are several GPUs, but fewer than replicas.
    """
    gpus = visible_gpus() if device.type == "cuda" else 0
    if replicas is None:
        return max(2, gpus)
    if 2 <= gpus < replicas:
        fail(f"argument --replicas: {replicas} replicas need as many GPUs, {gpus} are visible")
    return replicas


def visible_gpus() -> int:
    with _without_starting_cuda():
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def _without_starting_cuda() -> Iterator[None]:
    """Within the block torch asks the driver, not the CUDA runtime: after that a notebook could start no processes.

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


def warn_of_slow_precision(precision: str, device: torch.device) -> None:
    """Say once, on stderr, that fp16 makes a CPU slow."""
    if precision == "fp16" and device.type == "cpu" and os.environ.get("RANK", "0") == "0":
        slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's"
        print(f"warning: {slow}", file=sys.stderr, flush=True)
