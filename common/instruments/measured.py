"""The one block that a training enters to be measured."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from common.errors import fail
from common.instruments.clock import Clock
from common.instruments.result import plan_line, result_line, write_files
from common.process_group import all_gather_object, get_rank, get_world_size, is_distributed

Report = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def measured(args: Namespace, model: nn.Module, train_set: Any, test_set: Any) -> Iterator[Report]:
    """Measure the training in the block, and at its end print and write the result. All processes enter it.

    Rank 0 says before the training what is about to happen, draws a bar on a terminal, and at the end prints the
    result and writes it and the weights where `--json` and `--save` say.

    Args:
        args: of `common.args.parse_args`.
        model: on its device, wrapped or not.
        train_set, test_set: of `common.data.load_data`.

    Yields:
        report(loss, eval_loss, accuracy, evaluated), to be called by all processes after each evaluation: the epoch's
        mean training loss, the evaluation's mean loss and accuracy (a fraction) over all ranks, and the number of
        samples that were evaluated. A run that was resumed adds `steps`, those of the whole training. It returns the
        result so far, with the keys of the ladder's contract.

    Raises:
        UserError: if a loss is not finite, or if a file cannot be written.
    """
    network = getattr(model, "module", model)
    # DDP hands each micro-batch on to its network; DataParallel calls copies of it.
    called = network if isinstance(model, DistributedDataParallel) else model
    device = next(network.parameters()).device
    gpus = _gpus(device, getattr(model, "device_ids", None))
    setting = _setting(args, model, device, train_set.name)
    steps_per_epoch = len(train_set) // args.batch_size
    total_steps = steps_per_epoch * args.epochs
    is_main = get_rank() == 0
    if is_main:
        print(plan_line(args, setting, len(train_set), len(test_set), total_steps), flush=True)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)

    # None: no bar where stderr is not a terminal.
    disable = None if is_main else True
    bar = tqdm(total=total_steps, desc=args.script, leave=False, disable=disable)
    accumulation = getattr(args, "gradient_accumulation_steps", 1)
    clock = Clock(called, device, steps_per_epoch, accumulation, args.warm_up_steps, bar)
    result = setting

    def report(loss: float, eval_loss: float, accuracy: float, evaluated: float, steps: int | None = None) -> dict:
        clock.stop()
        steps = steps or clock.steps
        for name, value in (("training", loss), ("evaluation", eval_loss)):
            if not math.isfinite(value):
                fail(f"the {name}'s loss is not finite ({value}) after step {steps}")
        peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in gpus]
        if gpus:  # a rank can ask its own GPU only
            peaks = [peak for of_rank in all_gather_object(peaks) for peak in of_rank]
        result.update(
            steps=steps,
            loss=loss,
            eval_loss=eval_loss,
            accuracy=accuracy,
            evaluated=int(evaluated),
            images_per_sec=round(_images_per_second(clock, args), 1),
            seconds=round(clock.seconds, 3),
            peak_memory_bytes=peaks or None,
            memory_source="measured" if peaks else None,
        )
        return result

    with clock:
        yield report
    if is_main:
        print(result_line(result), flush=True)
        write_files(args, result, network)


def _setting(args: Namespace, model: nn.Module, device: torch.device, dataset: str) -> dict[str, Any]:
    """The part of the result that is known before the training."""
    backend = dist.get_backend() if is_distributed() else None
    world_size = get_world_size()
    if "replicas" in args:
        backend = type(model).__name__
        world_size = args.replicas
    return {
        "level": args.level,
        "dataset": dataset,
        "device": device.type,
        "backend": backend,
        "world_size": world_size,
        "global_batch_size": args.batch_size,
        "epochs": args.epochs,
        "steps": 0,
        "seed": args.seed,
    }


def _gpus(device: torch.device, replicas: list[int] | None) -> list[torch.device]:
    """The GPUs that this process computes on."""
    if device.type != "cuda":
        return []
    if replicas:  # of DataParallel; DistributedDataParallel and the emulation name none
        return [torch.device("cuda", index) for index in replicas]
    return [device]


def _images_per_second(clock: Clock, args: Namespace) -> float:
    """Global samples a second after the warm-up, or of all steps where there are no more; 0.0 without any step."""
    steps = clock.steps - args.warm_up_steps
    seconds = clock.seconds - clock.warm_up_seconds
    if steps <= 0:
        steps = clock.steps
        seconds = clock.seconds
    return steps * args.batch_size / seconds if seconds else 0.0
