"""The result of a run: one line for people, JSON for programs, and the final weights."""

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import fail
from common.files import write_atomically
from common.run.meter import Meter
from common.run.plan import Plan


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Let the allocator of each GPU measure its peak anew."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(devices: Sequence[torch.device]) -> list[int]:
    """The peak of each device's own allocator; nothing for a CPU, which keeps none."""
    return [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]


def make_result(
    args: Any, plan: Plan, meter: Meter, train_loss: Tensor | float, totals: Tensor, peaks: list[int]
) -> dict[str, Any]:
    """The result with the keys of the ladder's contract. UserError if the evaluation's loss is not finite.

    Args:
        train_loss: the last epoch's mean loss over all ranks.
        totals: float64 [loss sum, correct, samples] of the last evaluation over all ranks.
        peaks: bytes, one entry per device or rank; empty where the devices keep no peak.
    """
    loss_sum, correct, evaluated = totals.tolist()
    if not math.isfinite(loss_sum):
        fail(f"loss is not finite ({loss_sum}) in the evaluation after step {meter.steps}")
    return {
        "level": plan.level,
        "dataset": plan.dataset,
        "device": plan.device_type,
        "backend": plan.backend,
        "world_size": plan.workers,
        "global_batch_size": plan.batch_size,
        "epochs": args.epochs,
        "steps": meter.steps,
        "seed": args.seed,
        "loss": float(train_loss),
        "eval_loss": loss_sum / evaluated,
        "accuracy": correct / evaluated,
        "evaluated": int(evaluated),
        "images_per_sec": round(meter.images_per_sec, 1),
        "seconds": round(meter.seconds, 3),
        "peak_memory_bytes": peaks or None,
        "memory_source": "measured" if peaks else None,
    }


def result_line(result: dict[str, Any]) -> str:
    return (
        f"{result['level']}: {result['dataset']} accuracy {result['accuracy']:.2%} of {result['evaluated']} | "
        f"loss {result['loss']:.4f}, eval loss {result['eval_loss']:.4f} | "
        f"{result['images_per_sec']:.0f} images/s | {result['steps']} steps in {result['seconds']:.1f} s"
    )


def write_weights(path: Path, model: nn.Module) -> None:
    """Write the state dict of `model`, on the CPU, complete or not at all. UserError if it cannot be written."""
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    # Into memory first, because torch.save does not say why a file could not be written.
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    _write(path, buffer.getvalue())


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result, complete or not at all. UserError if it cannot be written."""
    text = json.dumps(result, indent=2)
    _write(path, f"{text}\n".encode())


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        fail(f"{path} cannot be written: {error}")
