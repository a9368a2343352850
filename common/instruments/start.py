"""The preparation of a process before torch computes anything: allocator, cores, threads, and its end with torchrun."""

import os
from argparse import Namespace

import torch

from common.allocator import keep_large_blocks
from common.cores import available_cores, confine_to_device, threads_per_worker, use_all_cores
from common.errors import fail
from common.gpus import visible_gpus
from common.machine import fit_to_machine, is_one_process
from common.process_group import end_with_launcher

_LAUNCHER_THREADS = "ACCELERATE_CPU_THREADS"


def prepare_process(args: Namespace) -> Namespace:
    """Set this process up for the run that the flags ask for. Returns its settings (see `fit_to_machine`).

    On a CPU the C library keeps large blocks of memory (`--allocator`). Each process has the threads of its device
    (`--cores-per-device`) or an equal share of this machine's cores, where torchrun would give it a single thread. It
    ends when its launcher does.

    Raises:
        UserError: if the script was launched in a way that it cannot use, or if the cores are too few for the devices
            that the flags ask for.
    """
    settings = fit_to_machine(args)
    check_launch(settings)
    end_with_launcher()
    if settings.device.type == "cpu":
        _prepare_cpu(settings)
    elif settings.cores_per_device:
        fail("--cores-per-device: this run computes on a GPU, and only a CPU can be divided into devices")
    return settings


def _prepare_cpu(settings: Namespace) -> None:
    if settings.allocator == "keep":
        keep_large_blocks()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_all_cores()  # an earlier run in this process may have confined it
    if settings.cores_per_device:
        devices = getattr(settings, "replicas", processes)
        _check_cores(settings.cores_per_device, devices)
        confine_to_device(int(os.environ.get("LOCAL_RANK", 0)), settings.cores_per_device)
    if _LAUNCHER_THREADS not in os.environ:
        torch.set_num_threads(threads_per_worker(processes))


def check_launch(settings: Namespace) -> None:
    """Refuse a launch that the script cannot use: several processes of level 00 or 01, or level 02 without torchrun.

    Level 02 also needs a GPU for each process, or none: nccl cannot share one. Its mesh needs as many processes as make
    whole rows, and of fc1's 128 outputs equally many for each rank of a row.

    Raises:
        UserError: after one line that says what to do.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if is_one_process(settings) and world_size > 1:
        advice = "start it with python, not torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "unset it"
        fail(f"{settings.script} is one process, but WORLD_SIZE is {world_size}: {advice}")
    if settings.level == "02_ddp_raw":
        if "RANK" not in os.environ:
            file = settings.script.partition("/")[2] or "train"
            fail(f"{settings.script} needs torchrun: torchrun --standalone --nproc-per-node 2 02_ddp_raw/{file}.py")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = visible_gpus()
        if settings.device.type == "cuda" and ranks > gpus:
            fail(f"{ranks} processes need as many GPUs, {gpus} are visible: start fewer, or add --device cpu")
    tensor = getattr(settings, "tensor", 1)
    if world_size % tensor:
        fail(f"--tensor {tensor} does not divide the number of processes, {world_size}")
    if 128 % tensor:
        fail(f"--tensor {tensor} does not divide fc1's outputs, 128: it must be a power of 2")


def _check_cores(each: int, devices: int) -> None:
    launchers = os.environ.get(_LAUNCHER_THREADS, str(each))
    if launchers != str(each):
        fail(
            f"--cores-per-device {each} contradicts the launcher's --num_cpu_threads_per_process {launchers} "
            f"({_LAUNCHER_THREADS}): give one of them"
        )
    cores = available_cores()
    if each * devices > cores:
        fail(f"--cores-per-device {each}: {devices} × {each} cores are needed, there are {cores}")
