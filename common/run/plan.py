"""What a run is about to do: how many steps, on how many workers, with which share of the batch."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import fail


@dataclass(frozen=True)
class Plan:
    """What a run is about to do; as a text, the line that is printed before the training.

    Attributes:
        device_type: "cpu" or "cuda".
        backend: what carries the gradients between the workers; None where there is one worker.
        workers: processes, or at level 01 replicas.
        threads: of each process.
        keeps_blocks: whether the C library keeps large blocks of memory from step to step.
        batch_size: samples of one optimizer step over all workers.
        accumulation: micro-batches of each worker in one optimizer step.
        steps_per_epoch, total_steps: optimizer steps.
    """

    level: str
    dataset: str
    train_samples: int
    test_samples: int
    device_type: str
    backend: str | None
    workers: int
    threads: int
    batch_size: int
    accumulation: int
    steps_per_epoch: int
    total_steps: int
    keeps_blocks: bool = False

    def micro_batches_left(self, epoch: int, steps_done: int) -> int:
        """How many micro-batches each worker still trains on in `epoch`, counted from 0, after `steps_done` steps."""
        end_of_epoch = self.steps_per_epoch * (epoch + 1)
        last_step = min(end_of_epoch, self.total_steps)
        return (last_step - steps_done) * self.accumulation

    def __str__(self) -> str:
        workers = f"{self.workers} × {self.backend}" if self.backend else "1 process"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''} each"
        samples = f"{self.dataset} {self.train_samples} + {self.test_samples}"
        where = f"{workers} on {self.device_type}, {threads}"
        if self.keeps_blocks:
            where += ", allocator keeps blocks"
        return f"{self.level}: {where} | {samples} | batch {self._shares()} | {self.total_steps} steps"

    def _shares(self) -> str:
        """How the global batch is shared: '64 = 32 + 32', '64 = 22 + 22 + 20', '48 = 2 × 12 × 2 micro-batches'."""
        size = self.batch_size
        if self.workers * self.accumulation == 1:
            return f"{size}"
        if self.accumulation > 1:
            micro_batch = size // self.workers // self.accumulation
            return f"{size} = {self.workers} × {micro_batch} × {self.accumulation} micro-batches"
        shards = torch.empty(size).chunk(self.workers)  # as DataParallel cuts it
        sizes = [str(len(shard)) for shard in shards]
        return f"{size} = {' + '.join(sizes)}"


def make_plan(
    args: Any,
    train_set: Any,
    test_set: Sized,
    device: torch.device,
    backend: str | None,
    workers: int,
    keeps_blocks: bool = False,
) -> Plan:
    """The plan that the flags ask for. UserError if the training set does not fill one batch."""
    steps_per_epoch = len(train_set) // args.batch_size
    if steps_per_epoch == 0:
        fail(f"{len(train_set)} training samples are fewer than one batch of {args.batch_size}")
    total_steps = steps_per_epoch * args.epochs
    if args.max_steps:
        total_steps = min(total_steps, args.max_steps)
    return Plan(
        level=args.level,
        dataset=train_set.name,
        train_samples=len(train_set),
        test_samples=len(test_set),
        device_type=device.type,
        backend=backend,
        workers=workers,
        threads=torch.get_num_threads(),
        batch_size=args.batch_size,
        accumulation=getattr(args, "gradient_accumulation_steps", 1),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        keeps_blocks=keeps_blocks,
    )
