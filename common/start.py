"""The start of a run: what its flags ask for is fitted to the machine, checked against the launch, and set up."""

import ctypes
import os
import signal
import sys
from argparse import Namespace

import torch

from common.allocator import keep_large_blocks
from common.cores import available_cores, confine_to_device, threads_per_worker, use_all_cores
from common.errors import fail
from common.machine import find_device
from common.model import HIDDEN

ONE_PROCESS = ("00_single_gpu", "01_data_parallel")  # the levels without collectives
# A launcher sets these from its file.
LAUNCHER_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
LAUNCHER_THREADS = "ACCELERATE_CPU_THREADS"
PR_SET_PDEATHSIG = 1  # in Linux's prctl.h


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


def fit_to_machine(args: Namespace) -> Namespace:
    """A copy of the flags in which values that depend on the machine are filled in.

    `device` becomes a torch.device, and level 01's `replicas` a number.

    Raises:
        UserError: after one line that says what to do.
    """
    settings = Namespace(**vars(args))
    settings.device = find_device(args.device, one_process=args.level in ONE_PROCESS)
    if "replicas" in args:
        settings.replicas = _choose_replicas(args.replicas, settings.device)
    if "mixed_precision" in args:
        is_first = os.environ.get("RANK", "0") == "0"
        if args.mixed_precision == "fp16" and settings.device.type == "cpu" and is_first:
            slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's"
            print(f"warning: {slow}", file=sys.stderr, flush=True)
        steps = args.gradient_accumulation_steps
        _check_launcher("--gradient-accumulation-steps", steps, "--gradient_accumulation_steps", LAUNCHER_ACCUMULATION)
    return settings


def _choose_replicas(replicas: int | None, device: torch.device) -> int:
    """The number of DataParallel's replicas: what the flag says, else the visible GPUs, at least 2."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if replicas is None:
        return max(2, gpus)
    if 2 <= gpus < replicas:
        fail(f"argument --replicas: {replicas} replicas need as many GPUs, {gpus} are visible")
    return replicas


def check_launch(settings: Namespace) -> None:
    """Refuse a launch that the script cannot use: several processes of level 00 or 01, or level 02 without torchrun.

    Level 02 also needs a GPU for each process, or none: nccl cannot share one.

    Raises:
        UserError: after one line that says what to do.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if settings.level in ONE_PROCESS and world_size > 1:
        advice = "start it with python, not torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "unset it"
        fail(f"{settings.script} is one process, but WORLD_SIZE is {world_size}: {advice}")
    if settings.level == "02_ddp_raw":
        if "RANK" not in os.environ:
            file = settings.script.partition("/")[2] or "train"
            fail(f"{settings.script} needs torchrun: torchrun --standalone --nproc-per-node 2 02_ddp_raw/{file}.py")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        if settings.device.type == "cuda" and ranks > gpus:
            fail(f"{ranks} processes need as many GPUs, {gpus} are visible: start fewer, or add --device cpu")
    if "tensor" in settings:
        _check_mesh(settings.tensor, world_size)


def _check_mesh(tensor: int, world_size: int) -> None:
    """A mesh needs whole rows of `tensor` ranks, and equally many of fc1's outputs for each rank of a row."""
    if world_size % tensor:
        fail(f"--tensor {tensor} does not divide the number of processes, {world_size}")
    if HIDDEN % tensor:
        fail(f"--tensor {tensor} does not divide fc1's outputs, {HIDDEN}: it must be a power of 2")


def end_with_launcher() -> None:
    """Let Linux send SIGTERM to this rank when torchrun has ended, for any reason.

    torchrun ends its ranks when it gets a signal. It cannot when it is killed, for example because memory ran out, and
    its ranks would continue to train.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prepare_cpu(settings: Namespace) -> None:
    if settings.allocator == "keep":
        keep_large_blocks()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_all_cores()  # an earlier run in this process may have confined it
    each = settings.cores_per_device
    if each:
        _check_launcher("--cores-per-device", each, "--num_cpu_threads_per_process", LAUNCHER_THREADS)
        devices = getattr(settings, "replicas", processes)
        cores = available_cores()
        if each * devices > cores:
            fail(f"--cores-per-device {each}: {devices} × {each} cores are needed, there are {cores}")
        confine_to_device(int(os.environ.get("LOCAL_RANK", 0)), each)
    if LAUNCHER_THREADS not in os.environ:
        torch.set_num_threads(threads_per_worker(processes))


def _check_launcher(flag: str, value: int, launchers_flag: str, variable: str) -> None:
    """Refuse a flag for which a launcher has set another value in `variable`: levels 03 and 04 would obey that one."""
    launchers = os.environ.get(variable, str(value))
    if launchers != str(value):
        fail(f"{flag} {value} contradicts the launcher's {launchers_flag} {launchers} ({variable}): give one of them")
