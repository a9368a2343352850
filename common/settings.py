"""The settings of a run: its flags, completed and checked by what the machine, the launch and the launcher say."""

import os
import re
from argparse import Namespace

import torch

from common.args import PRECISIONS
from common.errors import fail
from common.launch import LAUNCHER_ACCUMULATION, LAUNCHER_PRECISION, LAUNCHER_THREADS, Launch, read_launch
from common.levels import NEED_TORCHRUN, ONE_PROCESS, WITH_ACCELERATOR, WITH_CHECKPOINTS, WITH_REPLICAS
from common.model import HIDDEN


def fit_to_machine(args: Namespace) -> Namespace:
    """A copy of the flags in which what they leave open is decided. Neither the flags nor this process change.

    `device` becomes a torch.device, and level 01's `replicas` a number: by default the visible GPUs, and at least 2.
    Precision and accumulation of a `train_full` are by default the launcher's, see `take_launchers_settings`.

    Raises UserError if the machine lacks the device or the GPUs, if the flags contradict the launcher, if the script
    was launched in a way that it cannot use, or if the processes cannot share a batch.
    """
    settings = Namespace(**vars(args))
    settings.device = find_device(args.device, one_process=args.level in ONE_PROCESS)
    if args.level in WITH_REPLICAS:
        gpus = torch.cuda.device_count() if settings.device.type == "cuda" else 0
        settings.replicas = args.replicas or max(2, gpus)
        if 2 <= gpus < settings.replicas:
            fail(f"argument --replicas: {settings.replicas} replicas need as many GPUs, {gpus} are visible")
    if args.level in WITH_ACCELERATOR:
        take_launchers_settings(settings)
    if args.cores_per_device:
        check_cores_per_device(settings)
    launch = read_launch()
    check_launch(settings, launch)
    check_shares(settings, launch)
    return settings


def find_device(text: str, one_process: bool) -> torch.device:
    """The device that `text` names. A GPU has an index if `one_process`; else each rank chooses its own later.

    Raises UserError for another text than auto, cpu, cuda and, if `one_process`, cuda:N; for a device that is missing.
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


def take_launchers_settings(settings: Namespace) -> None:
    """Decide precision and accumulation of levels 03 and 04, which a launcher's variables may name too.

        variable       in a train_full.py                          in a train.py, which has no such flag
        precision      the default of --mixed-precision            refused, unless it is "no"
        accumulation   the default, and no other number is taken   refused, unless it is 1

    Raises UserError for what is refused, and in a `train_full` for values that its flags do not take.
    """
    precision = os.environ.get(LAUNCHER_PRECISION, "no")
    accumulation = os.environ.get(LAUNCHER_ACCUMULATION, "1")
    if settings.script in WITH_CHECKPOINTS:
        if precision not in PRECISIONS:
            fail(f"{LAUNCHER_PRECISION} is {precision!r}: it must be no, fp16 or bf16")
        if not re.fullmatch("[1-9][0-9]*", accumulation):
            fail(f"{LAUNCHER_ACCUMULATION} is {accumulation!r}: it must be a whole number of at least 1")
        settings.mixed_precision = settings.mixed_precision or precision
        settings.gradient_accumulation_steps = settings.gradient_accumulation_steps or int(accumulation)
    elif precision != "no":
        fail(f"the launcher's {LAUNCHER_PRECISION}={precision}: only train_full.py has --mixed-precision")
    steps = str(settings.gradient_accumulation_steps)
    if LAUNCHER_ACCUMULATION in os.environ and accumulation != steps:
        flag = f"--gradient-accumulation-steps {steps}"
        fail(f"the launcher's {LAUNCHER_ACCUMULATION}={accumulation} contradicts {flag}: give one, to train_full.py")


def check_cores_per_device(settings: Namespace) -> None:
    """Raise UserError if there are no cores to divide, or if the launcher has named another number of threads."""
    if settings.device.type != "cpu":
        fail("--cores-per-device: this run computes on a GPU, and only a CPU can be divided into devices")
    cores = str(settings.cores_per_device)
    threads = os.environ.get(LAUNCHER_THREADS, cores)
    if threads != cores:
        fail(f"the launcher's {LAUNCHER_THREADS}={threads} contradicts --cores-per-device {cores}: give one of them")


def check_launch(settings: Namespace, launch: Launch) -> None:
    """Raise UserError for a level that cannot run as the processes that were launched."""
    if settings.level in ONE_PROCESS and launch.world_size > 1:
        advice = "start it with python, not torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "unset it"
        fail(f"{settings.script} is one process, but WORLD_SIZE is {launch.world_size}: {advice}")
    if settings.level in NEED_TORCHRUN:
        if "RANK" not in os.environ:
            script = settings.script if "/" in settings.script else f"{settings.script}/train"
            fail(f"{settings.script} needs torchrun: torchrun --standalone --nproc-per-node 2 {script}.py")
        ranks = launch.local_world_size
        gpus = torch.cuda.device_count()
        if settings.device.type == "cuda" and ranks > gpus:  # The level uses nccl, whose ranks cannot share a GPU.
            fail(f"{ranks} processes need as many GPUs, {gpus} are visible: start fewer, or add --device cpu")


def check_shares(settings: Namespace, launch: Launch) -> None:
    """Raise UserError if the processes cannot share the layers of a mesh, or the global batch, evenly."""
    tensor = settings.tensor  # the ranks of a row of a mesh, which have the same samples
    if launch.world_size % tensor:
        fail(f"--tensor {tensor} does not divide the number of processes, {launch.world_size}")
    if HIDDEN % tensor:
        fail(f"--tensor {tensor} does not divide fc1's outputs, {HIDDEN}: it must be a power of 2")
    num_shards = launch.world_size // tensor
    accumulation = settings.gradient_accumulation_steps
    divisor = num_shards * accumulation
    if settings.batch_size % divisor:
        factors = []
        if num_shards > 1:
            unit = "processes" if tensor == 1 else f"rows of {tensor} processes"
            factors.append(f"{num_shards} {unit}")
        if accumulation > 1:
            factors.append(f"{accumulation} accumulation steps")
        below = settings.batch_size // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else f"{divisor}"
        reason = f"is not divisible by {divisor} ({' × '.join(factors)})"
        fail(f"--batch-size {settings.batch_size} {reason}: use {nearest}")
