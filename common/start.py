"""The start of a run: its flags are fitted to the machine and checked against the launch; the process is set up."""

import ctypes
import os
import re
import signal
import sys
from argparse import Namespace
from pathlib import Path

import torch

from common.allocator import keep_large_blocks
from common.cores import available_cores, confine_to_device, threads_per_worker, use_all_cores
from common.errors import fail
from common.files import can_be_written, nearest_existing
from common.launch import LAUNCHER_ACCUMULATION, LAUNCHER_PRECISION, LAUNCHER_THREADS, Launch, read_launch
from common.levels import NEED_TORCHRUN, ONE_PROCESS, WITH_ACCELERATOR, WITH_CHECKPOINTS, WITH_REPLICAS
from common.model import HIDDEN

PR_SET_PDEATHSIG = 1  # in Linux's prctl.h


def prepare_process(args: Namespace) -> Namespace:
    """Set this process up for the run that the flags ask for. Returns its settings (see `fit_to_machine`).

    On a CPU the C library keeps large blocks of memory (`--allocator`). Each process has the threads of its device
    (`--cores-per-device`) or an equal share of this machine's cores, where torchrun would give it a single thread. On
    Linux it gets SIGTERM when torchrun has ended. Then it ends, and a `train_full` with `--checkpoint-dir` saves first.
    If the launcher has set ACCELERATE_MIXED_PRECISION, a `train_full` overwrites it with `--mixed-precision`.

    Raises:
        UserError: as `fit_to_machine`, and if files cannot be written, or the cores are too few for the devices that
            the flags ask for.
    """
    launch = read_launch()
    settings = fit_to_machine(args)
    if launch.rank == 0:  # It writes the files, and the machines of the other ranks need not have the folders.
        check_output_paths(settings)
        warn_of_slow_precision(settings)
    end_with_launcher()
    if settings.script in WITH_CHECKPOINTS and LAUNCHER_PRECISION in os.environ:
        # With neither fp16 nor bf16 set, the Trainer reads this variable, so it must say what the flag says.
        os.environ[LAUNCHER_PRECISION] = settings.mixed_precision
    if settings.device.type == "cpu":
        if settings.allocator == "keep":
            keep_large_blocks()
        share_out_cores(settings, launch)
    return settings


def fit_to_machine(args: Namespace) -> Namespace:
    """A copy of the flags in which values that depend on the machine are filled in, checked against the launch.

    `device` becomes a torch.device, and level 01's `replicas` a number: by default the visible GPUs, and at least 2.

    Raises:
        UserError: if the machine lacks the device or the GPUs, if GPUs are to be divided like cores, if the script was
            launched in a way that it cannot use, or if the processes cannot share a batch.
    """
    settings = Namespace(**vars(args))
    settings.device = find_device(args.device, one_process=args.level in ONE_PROCESS)
    if args.cores_per_device and settings.device.type != "cpu":
        fail("--cores-per-device: this run computes on a GPU, and only a CPU can be divided into devices")
    if args.level in WITH_REPLICAS:
        gpus = torch.cuda.device_count() if settings.device.type == "cuda" else 0
        settings.replicas = args.replicas or max(2, gpus)
        if 2 <= gpus < settings.replicas:
            fail(f"argument --replicas: {settings.replicas} replicas need as many GPUs, {gpus} are visible")
    launch = read_launch()
    refuse_ranks_of_one_process(settings, launch)
    require_torchrun(settings)
    require_gpu_per_rank(settings, launch)
    check_mesh(settings, launch)
    check_batch_size(settings, launch)
    refuse_contradicting_launcher(settings)
    return settings


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


def refuse_ranks_of_one_process(settings: Namespace, launch: Launch) -> None:
    """Raise UserError for a script of one process that runs on several ranks."""
    if settings.level in ONE_PROCESS and launch.world_size > 1:
        advice = "start it with python, not torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "unset it"
        fail(f"{settings.script} is one process, but WORLD_SIZE is {launch.world_size}: {advice}")


def require_torchrun(settings: Namespace) -> None:
    """Raise UserError for a script of level 02 that has no rank, which torchrun would have given it."""
    if settings.level in NEED_TORCHRUN and "RANK" not in os.environ:
        script = settings.script if "/" in settings.script else f"{settings.script}/train"
        fail(f"{settings.script} needs torchrun: torchrun --standalone --nproc-per-node 2 {script}.py")


def require_gpu_per_rank(settings: Namespace, launch: Launch) -> None:
    """Raise UserError if two ranks of level 02 would share a GPU, because nccl, which it uses there, refuses that."""
    ranks = launch.local_world_size
    gpus = torch.cuda.device_count()
    if settings.level in NEED_TORCHRUN and settings.device.type == "cuda" and ranks > gpus:
        fail(f"{ranks} processes need as many GPUs, {gpus} are visible: start fewer, or add --device cpu")


def check_mesh(settings: Namespace, launch: Launch) -> None:
    """Raise UserError for rows of `--tensor` ranks that are not whole, or that cannot share a layer evenly."""
    if launch.world_size % settings.tensor:
        fail(f"--tensor {settings.tensor} does not divide the number of processes, {launch.world_size}")
    if HIDDEN % settings.tensor:
        fail(f"--tensor {settings.tensor} does not divide fc1's outputs, {HIDDEN}: it must be a power of 2")


def check_batch_size(settings: Namespace, launch: Launch) -> None:
    """Raise UserError for a global batch that the processes cannot share evenly."""
    num_shards = launch.world_size // settings.tensor  # The ranks of a row of a mesh have the same samples.
    accumulation = settings.gradient_accumulation_steps
    divisor = num_shards * accumulation
    if settings.batch_size % divisor:
        factors = []
        if num_shards > 1:
            unit = "processes" if settings.tensor == 1 else f"rows of {settings.tensor} processes"
            factors.append(f"{num_shards} {unit}")
        if accumulation > 1:
            factors.append(f"{accumulation} accumulation steps")
        below = settings.batch_size // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else f"{divisor}"
        reason = f"is not divisible by {divisor} ({' × '.join(factors)})"
        fail(f"--batch-size {settings.batch_size} {reason}: use {nearest}")


def refuse_contradicting_launcher(settings: Namespace) -> None:
    """Raise UserError for settings that contradict a launcher's variables, which an Accelerator would obey.

    A `train_full` overwrites the variable for the precision, see `prepare_process`, so its flag contradicts nothing.
    """
    if settings.level in WITH_ACCELERATOR and settings.script not in WITH_CHECKPOINTS:
        precision = os.environ.get(LAUNCHER_PRECISION, "no")
        if precision != "no":
            fail(f"the launcher's {LAUNCHER_PRECISION}={precision}: only train_full.py has --mixed-precision")
    if settings.level in WITH_ACCELERATOR:
        steps = settings.gradient_accumulation_steps
        launchers = os.environ.get(LAUNCHER_ACCUMULATION, str(steps))
        if launchers != str(steps):
            flag = f"--gradient-accumulation-steps {steps}"
            fail(f"the launcher's {LAUNCHER_ACCUMULATION}={launchers} contradicts {flag}: give one, to train_full.py")
    if settings.cores_per_device:
        threads = os.environ.get(LAUNCHER_THREADS, str(settings.cores_per_device))
        if threads != str(settings.cores_per_device):
            flag = f"--cores-per-device {settings.cores_per_device}"
            fail(f"the launcher's {LAUNCHER_THREADS}={threads} contradicts {flag}: give one of them")


def check_output_paths(settings: Namespace) -> None:
    """Raise UserError, before the training and not after it, for files and folders that cannot be written."""
    for flag, path in (("--save", settings.save), ("--json", settings.json)):
        if path is not None and not can_be_written(path):
            fail(f"argument {flag}: '{path}' cannot be written: it must be a file in a folder that exists")
    if settings.checkpoint_dir is not None:
        nearest = nearest_existing(Path(settings.checkpoint_dir))
        if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
            fail(f"argument --checkpoint-dir: nothing can be written to '{settings.checkpoint_dir}'")


def warn_of_slow_precision(settings: Namespace) -> None:
    """Print a warning for fp16 on a CPU."""
    if settings.mixed_precision == "fp16" and settings.device.type == "cpu":
        slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's"
        print(f"warning: {slow}", file=sys.stderr, flush=True)


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
