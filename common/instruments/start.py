"""The preparation of a process before torch computes anything: allocator, cores, threads, and its end with torchrun."""

import os
from argparse import Namespace

import torch

from common.allocator import keep_large_blocks
from common.cores import confine_to_device, threads_per_worker, use_all_cores
from common.errors import fail
from common.machine import LAUNCHER_THREADS, check_cores, check_launch, fit_to_machine
from common.process_group import end_with_launcher


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
        check_cores(settings.cores_per_device, devices)
        confine_to_device(int(os.environ.get("LOCAL_RANK", 0)), settings.cores_per_device)
    if LAUNCHER_THREADS not in os.environ:
        torch.set_num_threads(threads_per_worker(processes))
