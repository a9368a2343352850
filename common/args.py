"""The flags of every level, and their checks: a wrong flag or value is one line and a non-zero exit."""

import argparse
import contextlib
import io
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from common.cores import available_cores, confine_to_device, use_all_cores
from common.errors import fail

# A script is named as in common.ladder: a level's train.py by the level, another one by level and file.
_ONE_PROCESS = ("00_single_gpu", "01_data_parallel")
TRAINING_DIGITS = 60_000  # of MNIST, and of the synthetic digits
_FULL = ("03_accelerate/train_full", "04_trainer")
_DISTRIBUTED = ("02_ddp_raw", "03_accelerate", *_FULL)
_OWN_FLAGS = {
    "--replicas": ("01_data_parallel",),
    "--timeout": _DISTRIBUTED,
    "--mixed-precision": _FULL,
    "--gradient-accumulation-steps": _FULL,
    "--checkpoint-dir": _FULL,
    "--checkpoint-every": _FULL,
}
PRECISIONS = ("no", "fp16", "bf16")
# How a launcher's configuration file arrives.
_LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"
_LAUNCHER_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_LAUNCHER_THREADS = "ACCELERATE_CPU_THREADS"
_SHARED_MEMORY = Path("/dev/shm")
_PIXELS = 28 * 28
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class CheckpointInterval(NamedTuple):
    """Time between two checkpoints: so many optimizer steps, or so many seconds; the other one is never."""

    steps: int = sys.maxsize
    seconds: float = math.inf


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_args(script: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags of the script at the path `script`, checked against each other and against this machine.

    `args.level` is the level's name, `args.script` that of the script, such as 03_accelerate/train_full, `args.device`
    a torch.device, `args.dtype` a torch.dtype, `args.checkpoint_every` a CheckpointInterval.

    With --cores-per-device this process is confined to the cores of its device here, before torch computes anything.

    Raises:
        UserError: after one line on stderr.
    """
    path = Path(script).resolve()
    _refuse_another_clone(path)
    _escape_what_stdout_cannot_encode()
    level = path.parent.name
    name = level if path.stem == "train" else f"{level}/{path.stem}"
    parser = _make_parser(name, prog=f"{level}/{path.name}")
    args, unknown = parser.parse_known_args(argv)
    _refuse_empty_values(parser, args)
    _refuse_unknown_flags(parser, name, unknown)
    args.level = level
    args.script = name
    args.dtype = getattr(torch, args.dtype)
    args.device = _device(args.device, name)
    if args.data == "device" and args.num_workers > 0:
        parser.error(
            "argument --data: on the device there is nothing for loader workers to do; leave --num-workers out"
        )
    if name in _OWN_FLAGS["--replicas"]:
        args.replicas = _replicas(args)
    if name in _FULL:
        args.gradient_accumulation_steps = _accumulation_steps(args, parser)
        if args.mixed_precision not in PRECISIONS:  # argparse does not look at a default
            fail(f"the launcher asks for {args.mixed_precision} ({_LAUNCHER_PRECISION}): use {', '.join(PRECISIONS)}")
    else:
        _refuse_what_the_launcher_asks_for(parser.prog)
    _check_environment(name)
    _check_world(name)
    samples = min(args.train_samples or TRAINING_DIGITS, TRAINING_DIGITS)
    check_batch_size(args, int(os.environ.get("WORLD_SIZE", 1)), samples)
    _check_shared_memory(args)
    _warn_of_slow_precision(args)
    if args.cores_per_device:
        _use_device_of_cores(args)
    return args


def _make_parser(name: str, prog: str) -> _Parser:
    parser = _Parser(prog=prog, allow_abbrev=False)
    flag = parser.add_argument
    flag("--epochs", type=_positive, default=1, metavar="N", help="passes over the training set")
    flag("--batch-size", type=_positive, default=64, metavar="N", help="global batch: samples per optimizer step")
    flag("--lr", type=_positive_float, default=1e-3, metavar="F", help="learning rate of AdamW")
    flag("--seed", type=_seed, default=42, metavar="N", help="weights, sample order, dropout")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto", help="auto: MNIST if it can be had")
    flag("--data-dir", default=os.environ.get("MNIST_ROOT", "data"), metavar="PATH", help="holds MNIST/raw")
    flag(
        "--allocator",
        choices=["keep", "system"],
        default="keep",
        help="keep: the C library keeps large blocks of the CPU's memory from step to step; system: it is left alone",
    )
    flag("--device", default="auto", help="auto, cpu, cuda" + (", cuda:N" if name in _ONE_PROCESS else ""))
    flag(
        "--cores-per-device",
        type=_positive,
        metavar="N",
        help="on a CPU: each process or replica has N threads on N cores of its own (default: they share all cores)",
    )
    flag("--num-workers", type=_natural, default=0, metavar="N", help="loader workers per process")
    flag("--data", choices=["host", "device"], default="host", help="where the images wait for their turn")
    flag("--max-steps", type=_positive, metavar="N", help="stop after N optimizer steps, then evaluate")
    flag("--no-dropout", action="store_true", help="for comparing levels")
    flag("--dtype", choices=["float32", "float64"], default="float32", help="float64 for comparing levels")
    flag("--train-samples", type=_positive, metavar="N", help="only the first N of them, for comparing levels")
    flag("--eval-samples", type=_positive, metavar="N", help="only the first N of them, for comparing levels")
    flag("--warm-up-steps", type=_natural, default=10, metavar="N", help="steps before images/s are measured")
    flag("--save", type=_writable, metavar="PATH", help="final weights, a state dict")
    flag("--json", type=_writable, metavar="PATH", help="the result")
    if name in _OWN_FLAGS["--replicas"]:
        flag("--replicas", type=_positive, metavar="N", help="copies of the model (default: visible GPUs, at least 2)")
    if name in _DISTRIBUTED:
        flag("--timeout", type=_seconds, default="300", metavar="SECONDS", help="of a collective")
    if name in _FULL:
        _add_flags_of_long_training(parser)
    return parser


def _add_flags_of_long_training(parser: _Parser) -> None:
    flag = parser.add_argument
    launchers = os.environ.get(_LAUNCHER_PRECISION, "no")
    flag("--mixed-precision", choices=PRECISIONS, default=launchers, help="default: the launcher's, or no")
    flag("--gradient-accumulation-steps", type=_positive, metavar="N", help="micro-batches per optimizer step")
    flag("--checkpoint-dir", type=_folder, metavar="PATH", help="save there, and resume from the newest one in it")
    flag(
        "--checkpoint-every",
        type=_interval,
        default="100",
        metavar="STEPS or SECONDSs",
        help="optimizer steps between checkpoints, or seconds: 60s",
    )


def _refuse_another_clone(script: Path) -> None:
    """Whoever has two clones and installed one of them would run the other one's scripts with its modules."""
    clone = script.parent.parent
    ours = Path(__file__).resolve().parent.parent
    if clone != ours and (clone / "common" / "args.py").exists():
        fail(
            f"{script} stands in another clone than the `common` that Python imports, which is that of {ours}: "
            f"pip install -e {clone}, or set PYTHONPATH={clone}"
        )


def _escape_what_stdout_cannot_encode() -> None:
    """As Python does on stderr: under PYTHONIOENCODING=ascii a plan line must not end the training."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _refuse_empty_values(parser: _Parser, args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        if value == []:  # what argparse makes of --name=--
            flag = name.replace("_", "-")
            parser.error(f"argument --{flag}: expected one argument")


def _refuse_unknown_flags(parser: _Parser, name: str, unknown: list[str]) -> None:
    for word in unknown:
        flag = word.partition("=")[0]
        if flag in _OWN_FLAGS:
            owners = " and ".join(_OWN_FLAGS[flag])
            parser.error(f"{flag} belongs to {owners}, not to {name}")
        parser.error(f"unknown argument {word}; {parser.prog} --help lists the flags")


def _accumulation_steps(args: argparse.Namespace, parser: _Parser) -> int:
    """The flag's number, or the launcher's. Against the launcher's word an Accelerator would not obey the flag."""
    flag = args.gradient_accumulation_steps
    text = os.environ.get(_LAUNCHER_ACCUMULATION)
    if text is None:
        return flag or 1
    try:
        launchers = _positive(text)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --gradient-accumulation-steps: {error}")
    if flag not in (None, launchers):
        fail(
            f"--gradient-accumulation-steps {flag} contradicts the launcher's --gradient_accumulation_steps {launchers}"
            f" ({_LAUNCHER_ACCUMULATION}): give one of them, or both the same value"
        )
    return launchers


def _refuse_what_the_launcher_asks_for(prog: str) -> None:
    """A script without mixed precision and accumulation must not train as though the launcher had not asked."""
    for variable, what, nothing in (
        (_LAUNCHER_PRECISION, "mixed precision", "no"),
        (_LAUNCHER_ACCUMULATION, "gradient accumulation", "1"),
    ):
        value = os.environ.get(variable, nothing)
        if value != nothing:
            fail(
                f"the launcher asks for {what} ({variable}={value}), which {prog} does not do: "
                "03_accelerate/train_full.py and 04_trainer/train.py do it"
            )


def _warn_of_slow_precision(args: argparse.Namespace) -> None:
    precision = getattr(args, "mixed_precision", "no")
    if args.device.type != "cpu" or os.environ.get("RANK", "0") != "0":
        return
    slow = None
    if precision == "fp16":
        slow = "fp16 on a CPU works, but its convolutions are some 90 times slower than float32's; bf16 is not"
    elif precision == "bf16" and not _cpu_has_bf16_instructions():
        slow = "this CPU has no instructions for bf16: training with it is some 10 times slower than with float32"
    if slow:
        print(f"warning: {slow}", file=sys.stderr, flush=True)


def _cpu_has_bf16_instructions() -> bool:
    """Does this CPU compute in bf16 by itself? True also where that is not known, as on ARM."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    # torch.cpu.get_capabilities(), which is public, is newer than the oldest torch that this project runs with.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _number(text: str, kind: type, least: float, description: str, most: float = sys.float_info.max) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most):
        raise argparse.ArgumentTypeError(f"must be {description}, not {text!r}")
    return value


def _positive(text: str) -> int:
    return _number(text, int, 1, "a whole number of at least 1")


def _natural(text: str) -> int:
    return _number(text, int, 0, "a whole number of at least 0")


def _seed(text: str) -> int:
    # NumPy takes 32 bits, and a rank and an epoch are added.
    return _number(text, int, 0, "a whole number from 0 to 4000000000", 4 * 10**9)


def _seconds(text: str) -> timedelta:
    # What lies above is more than a backend's clock can count.
    return timedelta(seconds=_number(text, int, 1, "a whole number from 1 to 1000000", 10**6))


def _interval(text: str) -> CheckpointInterval:
    """Steps, or with an "s" behind the number seconds."""
    if not text.endswith("s"):
        return CheckpointInterval(steps=_positive(text))
    description = "a whole number of steps, or of seconds with an s behind it as in 60s,"
    return CheckpointInterval(seconds=_number(text.removesuffix("s"), int, 1, description, 10**9))


def _positive_float(text: str) -> float:
    return _number(text, float, math.ulp(0.0), "a number above 0")


def _writable(text: str) -> Path:
    """A path in a folder that can be written to: better to learn that before the training than after it."""
    path = Path(text)
    if os.environ.get("RANK", "0") != "0":  # rank 0 writes, and its machine may be another one
        return path
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: it must be a file in a folder that exists")
    return path


def _folder(text: str) -> str:
    """One absolute path, whoever looks for the folder, and from where."""
    if not text:
        raise argparse.ArgumentTypeError("must name a folder")
    return os.path.abspath(os.path.expanduser(text))


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


def _visible_gpus() -> int:
    with _without_starting_cuda():
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _device(text: str, name: str) -> torch.device:
    """The device that `text` names: with its index where one process chooses it, without where each rank has its own.

    Raises:
        UserError: for anything but auto, cpu, cuda and, at levels of one process, cuda:N; if it is not there.
    """
    known = re.fullmatch("auto|cpu|cuda(:(?P<index>[0-9]{1,9}))?", text)
    if known is None:
        fail(f"argument --device: {text!r} is not auto, cpu or cuda; CUDA_VISIBLE_DEVICES says which GPUs to use")
    gpus = _visible_gpus()
    if text == "cpu" or (text == "auto" and gpus == 0):
        return torch.device("cpu")
    index = known["index"]
    if index is not None and name not in _ONE_PROCESS:
        advice = f"to choose among them set CUDA_VISIBLE_DEVICES={index}"
        fail(f"argument --device: {text!r}: each process takes the GPU of its local rank; {advice}")
    if gpus == 0:
        fail(f"argument --device: {text!r} cannot be used here (torch finds no GPU); try --device cpu")
    number = int(index or 0)
    if number >= gpus:
        fail(f"argument --device: {text!r} cannot be used here (GPUs 0 to {gpus - 1} are visible)")
    return torch.device("cuda", number) if name in _ONE_PROCESS else torch.device("cuda")


def _replicas(args: argparse.Namespace) -> int:
    gpus = _visible_gpus() if args.device.type == "cuda" else 0
    if args.replicas is None:
        return max(2, gpus)
    if 2 <= gpus < args.replicas:
        fail(f"argument --replicas: {args.replicas} replicas need as many GPUs, {gpus} are visible")
    return args.replicas


def _use_device_of_cores(args: argparse.Namespace) -> None:
    """Confine this process to the device of its local rank; at level 01, where it has several, to the first.

    Raises:
        UserError: on a GPU, where the launcher wants another number of threads, or where the cores are too few.
    """
    each = args.cores_per_device
    if args.device.type != "cpu":
        fail(
            f"--cores-per-device {each}: this run computes on a GPU, and only a CPU can be divided into devices: "
            "add --device cpu, or leave the flag out"
        )
    launchers = os.environ.get(_LAUNCHER_THREADS, str(each))
    if launchers != str(each):
        fail(
            f"--cores-per-device {each} contradicts the launcher's --num_cpu_threads_per_process {launchers} "
            f"({_LAUNCHER_THREADS}): give one of them"
        )
    devices = getattr(args, "replicas", None) or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    use_all_cores()  # of another run in this process only a part may be left
    cores = available_cores()
    if each * devices > cores:
        most = cores // devices
        advice = f"{most} is the most for each" if most else "leave the flag out, or use fewer devices"
        counted = "1 device needs" if devices == 1 else f"{devices} devices need"
        fail(f"--cores-per-device {each}: {counted} {each * devices} cores, there are {cores}: {advice}")
    confine_to_device(int(os.environ.get("LOCAL_RANK", 0)), each)
    torch.set_num_threads(each)


def _check_environment(script: str) -> None:
    """Refuse an environment that is half set, or that makes no sense."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
    if given and missing and script in _ONE_PROCESS:
        fail(f"{script} is one process, but {', '.join(given)} is set: unset it")
    if given and missing:
        fail(f"{', '.join(given)} is set but {', '.join(missing)} is not: start the ranks with torchrun, or set all")
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number = os.environ.get(name, "0")
        total = os.environ.get(of, "1")
        fits = number.isdecimal() and total.isdecimal() and int(number) < int(total)
        if not fits:
            fail(f"{name}={number} does not fit {of}={total}: ranks are numbered from 0")


def _check_shared_memory(args: argparse.Namespace) -> None:
    """Loader workers hand their batches over in /dev/shm, of which a container has 64 MB."""
    if args.num_workers == 0 or not _SHARED_MEMORY.is_dir():
        return
    # Each worker has two micro-batches ready, and some more are in use. The ranks share one, so their sum is the same.
    micro_batch = args.batch_size // getattr(args, "gradient_accumulation_steps", 1)
    batch = micro_batch * (_PIXELS * args.dtype.itemsize + torch.int64.itemsize)
    needed = (2 * args.num_workers + 4) * batch
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < needed:
        fail(
            f"--num-workers {args.num_workers} needs {needed / 2**20:.1f} MiB in {_SHARED_MEMORY}, which has "
            f"{free / 2**20:.1f} MiB free: give it more (docker run --shm-size 1g), or leave --num-workers out"
        )


def _check_world(script: str) -> None:
    """Refuse processes that a script cannot use."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if script in _ONE_PROCESS and world_size > 1:
        advice = "start it with python, not torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "unset it"
        fail(f"{script} is one process, but WORLD_SIZE is {world_size}: {advice}")


def check_batch_size(args: argparse.Namespace, world_size: int, samples: int) -> None:
    """Refuse a global batch that so many processes cannot share evenly, or that a training set cannot fill.

    Args:
        samples: in the training set.

    Raises:
        UserError: after one line, which names the nearest batches that divide.
    """
    accumulation = getattr(args, "gradient_accumulation_steps", 1)
    parts = world_size * accumulation
    if args.batch_size % parts:
        below = args.batch_size // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        micro = f" × {accumulation} accumulation steps" if accumulation > 1 else ""
        processes = f"{world_size} process{'es' if world_size > 1 else ''}"
        fail(f"--batch-size {args.batch_size} does not divide by {parts} ({processes}{micro}): use {nearest}")
    if samples < args.batch_size:
        fail(f"{samples} training samples are fewer than one batch of {args.batch_size}")
