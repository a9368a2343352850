"""Run, the facade that a train.py talks to: the plan, the batches of an epoch, the losses, the result."""

import io
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.allocator import keep_large_blocks, why_not
from common.args import check_batch_size
from common.cores import threads_per_worker
from common.errors import fail
from common.files import write_atomically
from common.process_group import end_with_launcher, get_rank, get_world_size, is_distributed
from common.run.metrics import (
    EpochLoss,
    LossWatch,
    Meter,
    demand_finite_weights,
    peak_memory_bytes,
    reset_peak_memory,
)

SECONDS_BETWEEN_LINES = 60  # in a log file, where no bar can be drawn


class Run:
    """One run of one level. Making it prints nothing, changes nothing, and involves no other process.

    Args:
        args: of `common.args.parse_args`.
        train_set, test_set: of `common.data.load_data`.
        device: of this process.
        devices: all that this process computes on, if there are several.
        backend: what carries the gradients between the workers; by default the process group's, if there is one.
        world_size: the number of workers, processes or replicas; by default of processes.

    Raises:
        UserError: if the processes cannot share a batch evenly, or the training set does not fill one.

    Attributes:
        accumulation: micro-batches of each worker in one optimizer step.
        steps_per_epoch, total_steps: optimizer steps.
        keeps_blocks: whether the C library is to keep large blocks of memory from step to step: see `common.allocator`.
        epoch: the present one, counted from 0.
        meter: steps and times.
        loss_watch: ends the run at a loss that is not finite.
    """

    def __init__(
        self,
        args: Any,
        train_set: Any,
        test_set: Any,
        device: torch.device,
        *,
        devices: Sequence[torch.device] | None = None,
        backend: str | None = None,
        world_size: int | None = None,
    ) -> None:
        self.args = args
        self.dataset = train_set.name
        self.train_samples = len(train_set)
        self.test_samples = len(test_set)

        self.rank = get_rank()
        self.device = device
        self.devices = devices or [device]
        self.world_size = world_size or get_world_size()
        self.backend = backend
        if backend is None and is_distributed():
            self.backend = dist.get_backend()
        self.keeps_blocks = device.type == "cpu" and args.allocator == "keep" and why_not() is None

        self.accumulation = getattr(args, "gradient_accumulation_steps", 1)
        # Again, because a notebook makes the flags before it starts the processes.
        check_batch_size(args, get_world_size(), self.train_samples)
        self.steps_per_epoch = self.train_samples // args.batch_size
        self.total_steps = self.steps_per_epoch * args.epochs
        if args.max_steps:
            self.total_steps = min(self.total_steps, args.max_steps)

        self.epoch = 0
        self.meter = Meter(device, args.batch_size, args.warm_up_steps)
        self.loss_watch = LossWatch(device, self.rank)
        self._epoch_loss = EpochLoss(device)
        self._last_line = 0.0

    @property
    def steps(self) -> int:
        """Optimizer steps done, those before a resumption included."""
        return self.meter.steps

    @property
    def plan(self) -> str:
        """The line to print before the training: on what it computes, on which data, in which batches and steps."""
        where = f"1 process on {self.device.type}"
        if self.backend:
            where = f"{self.world_size} × {self.backend} on {self.device.type}"

        threads = torch.get_num_threads()
        if self.device.type == "cpu" and self.world_size > get_world_size():
            threads = threads_per_worker(self.world_size)  # emulated replicas share the cores of one process
        each = " each" if self.world_size > 1 else ""

        precision = str(self.args.dtype).removeprefix("torch.")
        mixed = getattr(self.args, "mixed_precision", "no")
        if mixed != "no":
            precision = f"{mixed} mixed precision"

        unit = "core" if self.args.cores_per_device else "thread"
        how = f"{quantity(threads, unit)}{each}, {precision}"
        if self.keeps_blocks:
            how += ", allocator keeps blocks"
        samples = f"{self.dataset} {self.train_samples} + {self.test_samples}"
        steps = quantity(self.total_steps, "step")
        return f"{self.args.script}: {where}, {how} | {samples} | batch {self._shares()} | {steps}"

    def _shares(self) -> str:
        """The global batch and its shares: '64 = 32 + 32', '64 = 22 + 22 + 20', '48 = 2 × 12 × 2 micro-batches'."""
        size = self.args.batch_size
        if self.world_size * self.accumulation == 1:
            return f"{size}"
        if self.accumulation > 1:
            micro_batch = size // self.world_size // self.accumulation
            return f"{size} = {self.world_size} × {micro_batch} × {self.accumulation} micro-batches"
        shards = torch.empty(size).chunk(self.world_size)  # as DataParallel cuts it
        sizes = [str(len(shard)) for shard in shards]
        return f"{size} = {' + '.join(sizes)}"

    def begin(self) -> None:
        """Prepare this process: its allocator, its end with torchrun's, the measuring of its GPUs' memory."""
        if self.keeps_blocks:
            keep_large_blocks()
        end_with_launcher()
        reset_peak_memory(self.devices)
        self._last_line = time.monotonic()

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs, from 0 or from the epoch of the checkpoint that the run resumes from.

        They are as many as `--epochs` says, or as it takes to come to `--max-steps`. The first one begins the run.
        """
        self.begin()
        while True:
            yield self.epoch
            if self.steps >= self.total_steps:
                return
            self.epoch += 1
            self._epoch_loss.reset()

    @property
    def batches_done(self) -> int:
        """(Micro-)batches of this epoch that each worker has trained on."""
        return (self.steps - self.steps_per_epoch * self.epoch) * self.accumulation

    def batches(self, loader: Iterable) -> Iterator:
        """The batches of one epoch's training, timed and shown on a terminal; ends early at `--max-steps`."""
        end_of_epoch = self.steps_per_epoch * (self.epoch + 1)
        steps_left = min(end_of_epoch, self.total_steps) - self.steps
        left = steps_left * self.accumulation
        self.meter.start()
        with self._bar(left, self.args.script) as bar:
            for _, batch in zip(range(left), loader, strict=False):
                yield batch
                bar.update()
                self.log_progress()
        self.meter.stop()

    def eval_batches(self, loader: Any) -> Iterator:
        """The batches of one evaluation, shown on a terminal."""
        with self._bar(len(loader), "evaluation") as bar:
            for batch in loader:
                yield batch
                bar.update()

    def _bar(self, total: int, name: str) -> Any:
        from tqdm import tqdm

        # None: silent where stderr is not a terminal.
        disable = None if self.rank == 0 else True
        return tqdm(total=total, desc=name, leave=False, disable=disable)

    def log_progress(self) -> None:
        """Say once a minute how far the training is, where stderr is a file and not a terminal with a bar."""
        now = time.monotonic()
        if self.rank > 0 or now - self._last_line < SECONDS_BETWEEN_LINES or sys.stderr.isatty():
            return
        self._last_line = now
        line = f"{self.args.script}: step {self.steps} of {self.total_steps}"
        if self._epoch_loss.micro_batches:
            line += f", loss {self._epoch_loss.mean().item():.4f} in epoch {self.epoch + 1} of {self.args.epochs}"
        print(line, file=sys.stderr, flush=True)

    def count(self, loss: Tensor) -> None:
        """Count a (micro-)batch that has been trained with `loss`, a scalar that stays on its device.

        Raises:
            UserError: if a loss is not finite. On a CPU this call looks at `loss` itself, on a GPU at earlier losses.
        """
        self.loss_watch.note(loss, self.steps + 1)
        self._epoch_loss.add(loss)
        if self._epoch_loss.micro_batches % self.accumulation == 0:
            self.meter.step()

    def mean_loss(self) -> Tensor:
        """The mean of this process's training losses of this epoch, a float64 scalar on the device."""
        self.loss_watch.settle()
        return self._epoch_loss.mean()

    def demand_finite(self, model: nn.Module) -> None:
        """Raise UserError unless the losses so far and the weights of `model` are finite. This waits for the device."""
        self.loss_watch.settle()
        demand_finite_weights(model, self.steps)

    def average_losses(self) -> None:
        """Let this object's losses be the mean over the ranks: a checkpoint holds rank 0's, which must do for all.

        This is a collective: all processes must call it.
        """
        self._epoch_loss.average_over_ranks()

    def state_dict(self) -> dict[str, Any]:
        """The progress of the run, and its identity."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "seconds": self.meter.seconds,
            "loss_total": self._epoch_loss.total.item(),
            "micro_batches": self._epoch_loss.micro_batches,
            "accumulation": self.accumulation,
            "identity": self.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run that was asked to do the same; UserError names what differs."""
        for name, ours in self.identity().items():
            theirs = state["identity"].get(name, ours)  # an older checkpoint does not know all of them
            if theirs != ours:
                run = f"a run with {name} {theirs}, not {ours}"
                fail(f"the checkpoint in {self.args.checkpoint_dir} is of {run}")
        self.epoch = state["epoch"]
        self.meter.resume(state["steps"], state["seconds"])
        # With another number of micro-batches per step each of them counts for more, or for less.
        per_micro_batch = self.accumulation / state["accumulation"]
        self._epoch_loss.micro_batches = round(state["micro_batches"] * per_micro_batch)
        self._epoch_loss.total.fill_(state["loss_total"] * per_micro_batch)

    def report_resumption(self) -> None:
        """Say once at which step the run goes on."""
        if self.rank == 0:
            print(f"{self.args.level}: resumed at step {self.steps}", flush=True)

    def identity(self) -> dict[str, Any]:
        """All that must not change between a checkpoint and its resumption."""
        return {
            "level": self.args.level,
            "dataset": self.dataset,
            "training samples": self.train_samples,
            "batch size": self.args.batch_size,
            "learning rate": self.args.lr,
            "seed": self.args.seed,
            "dtype": str(self.args.dtype).removeprefix("torch."),
            "dropout": not self.args.no_dropout,
        }

    def peak_memory_bytes(self) -> list[int]:
        """The peak of the memory that this process has allocated on its devices: one entry per GPU, none on a CPU."""
        return peak_memory_bytes(self.devices)

    def result(
        self, train_loss: Tensor | float, totals: Tensor, peaks_of_ranks: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """The result, with the keys of the ladder's contract. UserError if the evaluation's loss is not finite.

        Args:
            train_loss: the last epoch's mean loss over all ranks.
            totals: float64 [loss sum, correct, samples] of the last evaluation over all ranks.
            peaks_of_ranks: `peak_memory_bytes` of every rank; by default there is this one only.
        """
        loss_sum, correct, evaluated = totals.tolist()
        if not math.isfinite(loss_sum):
            fail(f"loss is not finite ({loss_sum}) in the evaluation after step {self.steps}")
        peaks: list[int] = []
        for peaks_of_rank in peaks_of_ranks or [self.peak_memory_bytes()]:
            peaks += peaks_of_rank
        return {
            "level": self.args.level,
            "dataset": self.dataset,
            "device": self.device.type,
            "backend": self.backend,
            "world_size": self.world_size,
            "global_batch_size": self.args.batch_size,
            "epochs": self.args.epochs,
            "steps": self.steps,
            "seed": self.args.seed,
            "loss": float(train_loss),
            "eval_loss": loss_sum / evaluated,
            "accuracy": correct / evaluated,
            "evaluated": int(evaluated),
            "images_per_sec": round(self.meter.images_per_sec, 1),
            "seconds": round(self.meter.seconds, 3),
            "peak_memory_bytes": peaks or None,
            "memory_source": "measured" if peaks else None,
        }

    def report(self, result: dict[str, Any], model: nn.Module) -> None:
        """Print the result, and write it and the weights where `--json` and `--save` say. One process calls it.

        Args:
            model: the bare network, without any wrapper; its state dict is what `--save` writes.

        Raises:
            UserError: if a file cannot be written. What was there before is then untouched.
        """
        print(result_line(result), flush=True)
        if self.args.save:
            weights = {name: value.cpu() for name, value in model.state_dict().items()}
            # Into memory first, because torch.save does not say why a file could not be written.
            buffer = io.BytesIO()
            torch.save(weights, buffer)
            _write(self.args.save, buffer.getvalue())
        if self.args.json:
            text = json.dumps(result, indent=2)
            _write(self.args.json, f"{text}\n".encode())


def result_line(result: dict[str, Any]) -> str:
    """The result of `Run.result` as the line that ends a run."""
    speed = f"{result['images_per_sec']:.0f} images/s"
    if not result["images_per_sec"]:
        speed = "nothing was left to train"
    return (
        f"{result['level']}: {result['dataset']} accuracy {result['accuracy']:.2%} of {result['evaluated']} | "
        f"loss {result['loss']:.4f}, eval loss {result['eval_loss']:.4f} | "
        f"{speed} | {quantity(result['steps'], 'step')} in {result['seconds']:.1f} s"
    )


def quantity(number: int, noun: str) -> str:
    """'1 step', '2 steps'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        fail(f"{path} cannot be written: {error}")
