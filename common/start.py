"""The start of a run: this process is set up as its settings ask for."""

import ctypes
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import torch

from common.allocator import keep_large_blocks
from common.cores import available_cores, confine_to_device, threads_per_worker, use_all_cores
from common.errors import fail
from common.files import can_be_written, nearest_existing
from common.launch import LAUNCHER_THREADS, Launch, read_launch
from common.settings import fit_to_machine

PR_SET_PDEATHSIG = 1  # in Linux's prctl.h


def prepare_process(args: Namespace) -> Namespace:
    """Set this process up for the run that the flags ask for. Returns its settings, see `fit_to_machine`.

    1. The settings are decided. Rank 0 looks if files can be written.
    2. On Linux the process gets SIGTERM when torchrun has ended. A `train_full` with `--checkpoint-dir` then saves.
    3. On a CPU the C library keeps large blocks of memory (`--allocator`), and the process has the threads of its
       device (`--cores-per-device`) or an equal share of this machine's cores. torchrun would give it one thread.

    Raises UserError as `fit_to_machine`, for files that cannot be written, and for more devices than there are cores.
    """
    settings = fit_to_machine(args)
    launch = read_launch()
    if launch.rank == 0:  # It writes the files, and the machines of the other ranks need not have the folders.
        check_output_paths(settings)
        if settings.mixed_precision == "fp16" and settings.device.type == "cpu":
            slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's"
            print(f"warning: {slow}", file=sys.stderr, flush=True)
    end_with_launcher()
    if settings.device.type == "cpu":
        if settings.allocator == "keep":
            keep_large_blocks()
        share_out_cores(settings, launch)
    return settings


def check_output_paths(settings: Namespace) -> None:
    """Raise UserError, before the training and not after it, for files and folders that cannot be written."""
    for flag, path in (("--save", settings.save), ("--json", settings.json)):
        if path is not None and not can_be_written(path):
            fail(f"argument {flag}: '{path}' cannot be written: it must be a file in a folder that exists")
    if settings.checkpoint_dir is not None:
        nearest = nearest_existing(Path(settings.checkpoint_dir))
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            fail(f"argument --checkpoint-dir: nothing can be written to '{settings.checkpoint_dir}'")


def end_with_launcher() -> None:
    """Let Linux send SIGTERM to this rank when torchrun has ended, for any reason.

    torchrun ends its ranks when it gets a signal. It cannot when it is killed, for example because memory ran out, and
    its ranks would continue to train. Where it has ended before this call, nothing is sent.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def share_out_cores(settings: Namespace, launch: Launch) -> None:
    """Give this process its device's cores, or the threads of its share. Raises UserError if the cores are too few."""
    use_all_cores()  # An earlier run in this process may have confined it.
    each = settings.cores_per_device
    if each:
        devices = settings.replicas or launch.local_world_size
        cores = available_cores()
        if each * devices > cores:
            fail(f"--cores-per-device {each}: {devices} × {each} cores are needed, there are {cores}")
        confine_to_device(launch.local_rank, each)
    if LAUNCHER_THREADS not in os.environ:
        torch.set_num_threads(threads_per_worker(launch.local_world_size))
