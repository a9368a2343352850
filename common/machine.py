"""What a training gets on this machine, device, replicas and processes, checked against the flags."""

import os
import re
import sys
from argparse import Namespace

import torch

from common.cores import available_cores
from common.errors import fail

ONE_PROCESS = ("00_single_gpu", "01_data_parallel")  # the levels without collectives
# A launcher sets these from its file.
LAUNCHER_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
LAUNCHER_THREADS = "ACCELERATE_CPU_THREADS"


def fit_to_machine(args: Namespace) -> Namespace:
    """A copy of the flags in which values that depend on the machine are filled in.

    `device` becomes a torch.device, and level 01's `replicas` a number.

    Raises:
        UserError: after one line that says what to do.
    """
    settings = Namespace(**vars(args))
    settings.device = find_device(args.device, one_process=args.level in ONE_PROCESS)
    if "replicas" in args:
        settings.replicas = choose_replicas(args.replicas, settings.device)
    if "mixed_precision" in args:
        warn_of_slow_precision(args.mixed_precision, settings.device)
        steps = args.gradient_accumulation_steps
        check_launcher("--gradient-accumulation-steps", steps, "--gradient_accumulation_steps", LAUNCHER_ACCUMULATION)
    return settings


def check_launcher(flag: str, value: int, launchers_flag: str, variable: str) -> None:
    """Refuse a flag for which a launcher has set another value in `variable`: levels 03 and 04 would obey that one."""
    launchers = os.environ.get(variable, str(value))
    if launchers != str(value):
        fail(f"{flag} {value} contradicts the launcher's {launchers_flag} {launchers} ({variable}): give one of them")


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


def choose_replicas(replicas: int | None, device: torch.device) -> int:
    """The number of DataParallel's replicas: what the flag says, else the visible GPUs, at least 2.

    Raises:
        UserError: if there are several GPUs, but fewer than replicas.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if replicas is None:
        return max(2, gpus)
    if 2 <= gpus < replicas:
        fail(f"argument --replicas: {replicas} replicas need as many GPUs, {gpus} are visible")
    return replicas


def warn_of_slow_precision(precision: str, device: torch.device) -> None:
    """Say once, on stderr, that fp16 makes a CPU slow."""
    if precision == "fp16" and device.type == "cpu" and os.environ.get("RANK", "0") == "0":
        slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's"
        print(f"warning: {slow}", file=sys.stderr, flush=True)


def check_launch(settings: Namespace) -> None:
    """Refuse a launch that the script cannot use: several processes of level 00 or 01, or level 02 without torchrun.

    Level 02 also needs a GPU for each process, or none: nccl cannot share one. Its mesh needs as many processes as make
    whole rows, and of fc1's 128 outputs equally many for each rank of a row.

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
    tensor = getattr(settings, "tensor", 1)
    if world_size % tensor:
        fail(f"--tensor {tensor} does not divide the number of processes, {world_size}")
    if 128 % tensor:
        fail(f"--tensor {tensor} does not divide fc1's outputs, 128: it must be a power of 2")


def check_cores(each: int, devices: int) -> None:
    """Refuse a --cores-per-device that the launcher contradicts, or for which the cores are too few."""
    check_launcher("--cores-per-device", each, "--num_cpu_threads_per_process", LAUNCHER_THREADS)
    cores = available_cores()
    if each * devices > cores:
        fail(f"--cores-per-device {each}: {devices} × {each} cores are needed, there are {cores}")
