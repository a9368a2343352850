"""The lines printed before and after a training, and the files with its result and weights."""

import io
import json
import logging
import math
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.cores import threads_per_worker
from common.errors import fail
from common.files import write_atomically


class Hardware(NamedTuple):
    """The devices of a training: "cpu" or "cuda", the backend of the process group, and the number of processes.

    With a DataParallel the last two are its class and the number of its replicas. One process alone has no backend.
    """

    device: str
    backend: str | None
    world_size: int


def plan_line(args: Namespace, hardware: Hardware, train_set: Any, test_set: Any, total_steps: int) -> str:
    """The line before a training: devices, data, batches and steps."""
    device, backend, world_size = hardware
    where = f"{world_size} × {backend} on {device}" if backend else f"1 process on {device}"
    precision = str(args.dtype).removeprefix("torch.")
    if args.mixed_precision != "no":
        precision = f"{args.mixed_precision} mixed precision"
    shares = _shares(args.batch_size, world_size // args.tensor, args.gradient_accumulation_steps)
    return (
        f"{args.script}: {where}, {_threads(args, hardware)}, {precision} | "
        f"{train_set.name} {len(train_set)} + {len(test_set)} | batch {shares} | {quantity(total_steps, 'step')}"
    )


def _threads(args: Namespace, hardware: Hardware) -> str:
    """The threads of the processes or replicas: '2 threads each', or '2 cores each' with `--cores-per-device`."""
    unit = "core" if args.cores_per_device else "thread"
    count = torch.get_num_threads()
    if args.replicas and hardware.device == "cpu":
        count = threads_per_worker(hardware.world_size)  # Emulated replicas divide the cores of one process.
    is_shared = args.replicas and hardware.device != "cpu"  # Replicas on GPUs use the threads of one process together.
    each = " each" if hardware.world_size > 1 and not is_shared else ""
    return quantity(count, unit) + each


def _shares(batch_size: int, parts: int, accumulation: int) -> str:
    """The global batch and its shares: '64 = 32 + 32', '64 = 22 + 22 + 20', '48 = 2 × 12 × 2 micro-batches'."""
    if accumulation > 1:
        return f"{batch_size} = {parts} × {batch_size // parts // accumulation} × {accumulation} micro-batches"
    if parts == 1:
        return f"{batch_size}"
    largest = math.ceil(batch_size / parts)  # DataParallel cuts a batch by torch.chunk: the last share may be smaller.
    sizes = [str(min(largest, batch_size - start)) for start in range(0, batch_size, largest)]
    return f"{batch_size} = {' + '.join(sizes)}"


def result_parts(result: dict[str, Any]) -> list[str]:
    """The parts of the line after a training: its accuracy, its losses, its speed and its steps."""
    speed = f"{result['images_per_sec']:.0f} images/s"
    if not result["images_per_sec"]:
        speed = "no step so far in this run"
    return [
        f"{result['level']}: {result['dataset']} accuracy {result['accuracy']:.2%} of {result['evaluated']}",
        f"loss {result['loss']:.4f}, eval loss {result['eval_loss']:.4f}",
        speed,
        f"{quantity(result['steps'], 'step')} in {result['seconds']:.1f} s",
    ]


def quantity(number: int, noun: str) -> str:
    """'1 step', '2 steps', '2 processes'."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("s") else f"{number} {noun}s"


def whole_weights(network: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU. Weights that are sharded over the ranks are gathered, so all ranks call this."""
    # A weight that is cut twice along one dimension is gathered in two steps. torch would warn of that on every rank.
    logger = logging.getLogger("torch.distributed")
    level_before = logger.level
    logger.setLevel(logging.ERROR)
    weights = {}
    try:
        for name, value in network.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            weights[name] = whole.cpu()
    finally:
        logger.setLevel(level_before)
    return weights


def write_files(args: Namespace, result: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write the weights to the file of `--save` and the result to the file of `--json`, if they were given.

    Raises:
        UserError: if a file cannot be written. What was there before is then untouched.
    """
    files: dict[Path, str | bytes] = {}
    if args.save:
        # Saved to memory first, because torch.save to a path does not say why it failed.
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        files[args.save] = buffer.getvalue()
    if args.json:
        files[args.json] = json.dumps(result, indent=2) + "\n"
    for path, content in files.items():
        try:
            write_atomically(path, content)
        except OSError as error:
            fail(f"{path} cannot be written: {error}")
