"""The block in which a training is measured: it attaches the clock, prints each result, and writes the last one."""

import contextlib
import math
import sys
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
from common.instruments.result import Hardware, plan_line, result_parts, whole_weights, write_files
from common.process_group import all_gather_object, get_rank, get_world_size, is_distributed


@contextlib.contextmanager
def measured(
    args: Namespace, model: nn.Module, train_set: Any, test_set: Any, resumes: bool = False
) -> Iterator[Callable]:
    """Measure the training in the block. All processes enter it.

    The block calls `report` after each evaluation, or once at the end at level 04, whose loop is the Trainer's.
    Rank 0 prints the plan before the training and the result at each `report`, and draws a bar on a terminal. In the
    end it writes the last result and the weights to the files of `--json` and `--save`.

    Args:
        args: the flags, as `prepare_process` returns them.
        model: the network, wrapped or not. It may still be on the CPU, so the device is taken from `args`.
        train_set, test_set: the two sets that `common.data.load_data` returns.
        resumes: True if the training continues from a checkpoint. Its bar counts steps, without an end.

    Raises:
        UserError: if a file cannot be written.
    """
    network = getattr(model, "module", model)
    hardware = _hardware(args, model)
    steps_per_epoch = len(train_set) // args.batch_size
    total_steps = steps_per_epoch * args.epochs
    is_main = get_rank() == 0
    if is_main:
        print(plan_line(args, hardware, train_set, test_set, total_steps), flush=True)
    shows_bar = is_main and hasattr(sys.stderr, "isatty") and sys.stderr.isatty()  # stderr may be None.
    bar = tqdm(total=None if resumes else total_steps, desc=args.script, leave=False, disable=not shows_bar)
    # A hook on DDP would not see level 02's evaluation, which calls the network in it. A hook on a DataParallel's
    # network would run once for each replica.
    called = network if isinstance(model, DistributedDataParallel) else model
    clock = Clock(called, args.device, steps_per_epoch, args.gradient_accumulation_steps, args.warm_up_steps, bar)
    gpus = _gpus(model, args.device)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    measurement = _Measurement(args, train_set.name, hardware, clock, gpus)
    with bar, clock:
        yield measurement.report
    weights = whole_weights(network) if args.save else {}
    if is_main:
        write_files(args, measurement.result, weights)


@dataclass
class _Measurement:
    """A training that is measured: the flags, the data and the hardware, the instruments, and the newest result."""

    args: Namespace
    dataset: str
    hardware: Hardware
    clock: Clock
    gpus: list[torch.device]
    result: dict[str, Any] = field(default_factory=dict)

    def report(
        self, loss: float, eval_loss: float, accuracy: float, evaluated: float, steps: int | None = None
    ) -> dict:
        """Stop the clock, and return the result: the settings, these numbers of the training, and what was measured.

        A collective: each rank sends the peaks of its GPUs. Rank 0 prints the result.

        Args:
            loss: the epoch's mean training loss over all ranks.
            eval_loss, accuracy: the mean loss and the fraction of right answers in the evaluation, over all ranks.
            evaluated: the number of samples that were evaluated.
            steps: the number of optimizer steps of the whole training, if it was resumed.

        Raises:
            UserError: if a loss is not finite.
        """
        self.clock.end_epoch()
        steps = steps or self.clock.steps
        for name, value in (("training", loss), ("evaluation", eval_loss)):
            if not math.isfinite(value):
                fail(f"the {name}'s loss is not finite ({value}) after step {steps}")
        peaks = _peak_bytes(self.gpus)
        self.result = {
            "level": self.args.level,
            "dataset": self.dataset,
            **self.hardware._asdict(),
            "global_batch_size": self.args.batch_size,
            "epochs": self.args.epochs,
            "steps": steps,
            "seed": self.args.seed,
            "loss": loss,
            "eval_loss": eval_loss,
            "accuracy": accuracy,
            "evaluated": int(evaluated),
            "images_per_sec": round(self.clock.steps_per_second() * self.args.batch_size, 1),
            "seconds": round(self.clock.seconds, 3),
            "peak_memory_bytes": peaks,
            "memory_source": "measured" if peaks else None,
        }
        if get_rank() == 0:
            self.clock.bar.clear()
            print(" | ".join(result_parts(self.result)), flush=True)
        return self.result


def _hardware(args: Namespace, model: nn.Module) -> Hardware:
    if args.replicas:
        return Hardware(args.device.type, type(model).__name__, args.replicas)
    backend = dist.get_backend() if is_distributed() else None
    return Hardware(args.device.type, backend, get_world_size())


def _gpus(model: nn.Module, device: torch.device) -> list[torch.device]:
    """The GPUs that this process computes on: several under DataParallel, else that of the process."""
    if device.type != "cuda":
        return []
    if isinstance(model, nn.DataParallel):
        return [torch.device("cuda", index) for index in model.device_ids]
    return [device]  # Without an index it is the current one, which each rank has chosen by now.


def _peak_bytes(gpus: list[torch.device]) -> list[int] | None:
    """The peak of each GPU of all ranks, each of which can ask its own only; None on a CPU."""
    if not gpus:
        return None
    peaks = [torch.cuda.max_memory_allocated(gpu) for gpu in gpus]
    return [peak for of_rank in all_gather_object(peaks) for peak in of_rank]
