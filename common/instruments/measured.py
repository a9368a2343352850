"""The block in which a training is measured: it attaches the clock, prints each result, and writes the last one."""

import contextlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from common.errors import fail
from common.instruments.clock import Clock
from common.instruments.result import plan_line, result_parts, whole_weights, write_files
from common.process_group import all_gather_object, get_rank, get_world_size, is_distributed


@contextlib.contextmanager
def measured(
    args: Namespace, model: nn.Module, train_set: Any, test_set: Any, resumes: bool = False
) -> Iterator[Callable]:
    """Measure the training in the block, which calls `report` after each evaluation. All processes enter it.

    Rank 0 prints the plan before the training and the result at each `report`, and draws a bar on a terminal. In the
    end it writes the last result and the weights to the files of `--json` and `--save`. The block has to call `report`.

    Args:
        args: of `prepare_process`.
        model: wrapped or not. Under FSDP a Trainer moves it to its device later.
        train_set, test_set: of `common.data.load_data`.
        resumes: the training continues from a checkpoint. The bar then counts the steps of this run, without an end.

    Raises:
        UserError: if a loss is not finite, or if a file cannot be written.
    """
    network = getattr(model, "module", model)
    device = args.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # Each rank has chosen its own by now.
    steps_per_epoch = len(train_set) // args.batch_size
    total_steps = steps_per_epoch * args.epochs
    setting = _setting(args, model, device, train_set.name)
    is_main = get_rank() == 0
    if is_main:
        print(plan_line(args, setting, len(train_set), len(test_set), total_steps), flush=True)
    # The clock counts the forwards of a module that is called once for each micro-batch. Under DDP that is the network.
    # DataParallel calls copies of its network.
    called = network if isinstance(model, DistributedDataParallel) else model
    hides_bar = None if is_main else True  # None: tqdm hides it where stderr is not a terminal.
    bar = tqdm(total=None if resumes else total_steps, desc=args.script, leave=False, disable=hides_bar)
    clock = Clock(called, device, steps_per_epoch, args.gradient_accumulation_steps, args.warm_up_steps, bar)
    gpus = _gpus(model, device)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    measurement = _Measurement(setting, clock, gpus)
    with bar, clock:
        yield measurement.report
    weights = whole_weights(network) if args.save else {}
    if is_main:
        write_files(args, measurement.result, weights)


@dataclass
class _Measurement:
    """A training that is measured: what is known of it before, and the result that it has reported last."""

    setting: dict[str, Any]
    clock: Clock
    gpus: list[torch.device]
    result: dict[str, Any] = field(default_factory=dict)

    def report(
        self, loss: float, eval_loss: float, accuracy: float, evaluated: float, steps: int | None = None
    ) -> dict:
        """The result: the setting, these numbers of the training, and what was measured. All processes call it.

        Args:
            loss: the epoch's mean training loss over all ranks.
            eval_loss, accuracy: of the evaluation over all ranks, a mean and a fraction.
            evaluated: the number of samples that were evaluated.
            steps: of the whole training, if it was resumed.
        """
        self.clock.end_epoch()
        steps = steps or self.clock.steps
        for name, value in (("training", loss), ("evaluation", eval_loss)):
            if not math.isfinite(value):
                fail(f"the {name}'s loss is not finite ({value}) after step {steps}")
        peaks = _peak_bytes(self.gpus)
        self.result = {
            **self.setting,
            "steps": steps,
            "loss": loss,
            "eval_loss": eval_loss,
            "accuracy": accuracy,
            "evaluated": int(evaluated),
            "images_per_sec": round(self.clock.steps_per_second() * self.setting["global_batch_size"], 1),
            "seconds": round(self.clock.seconds, 3),
            "peak_memory_bytes": peaks,
            "memory_source": "measured" if peaks else None,
        }
        if get_rank() == 0:
            self.clock.bar.clear()
            print(" | ".join(result_parts(self.result)), flush=True)
        return self.result


def _setting(args: Namespace, model: nn.Module, device: torch.device, dataset: str) -> dict[str, Any]:
    """The part of the result that is known before the training."""
    backend = dist.get_backend() if is_distributed() else None
    world_size = get_world_size()
    if args.replicas:
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
        "steps": 0,  # The keys have the order of the file; `report` sets this one.
        "seed": args.seed,
    }


def _gpus(model: nn.Module, device: torch.device) -> list[torch.device]:
    """The GPUs that this process computes on: several under DataParallel, else that of the process."""
    if device.type != "cuda":
        return []
    if isinstance(model, nn.DataParallel):
        return [torch.device("cuda", index) for index in model.device_ids]
    return [device]


def _peak_bytes(gpus: list[torch.device]) -> list[int] | None:
    """The peak of each GPU of all ranks, each of which can ask its own only; None on a CPU."""
    if not gpus:
        return None
    peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in gpus]
    return [peak for of_rank in all_gather_object(peaks) for peak in of_rank]
