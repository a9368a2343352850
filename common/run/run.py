"""Run, the facade that a train.py talks to: the plan, the batches of an epoch, the losses, the result."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.allocator import keep_large_blocks
from common.errors import fail
from common.process_group import get_rank, get_world_size, is_distributed
from common.run.losses import EpochLoss, LossWatch, demand_finite_weights
from common.run.meter import Meter
from common.run.plan import make_plan
from common.run.result import (
    make_result,
    peak_memory_bytes,
    reset_peak_memory,
    result_line,
    write_json,
    write_weights,
)


class Run:
    """One run of one level. Making it prints nothing, and involves no other process.

    On a CPU it lets the C library keep large blocks of memory, unless `--allocator system` says otherwise: see
    `common.allocator`. The plan line says so.

    Args:
        args: of `common.args.parse_args`.
        train_set, test_set: of `common.data.load_data`.
        device: of this process.
        devices: all that this process computes on, if there are several.
        backend: what carries the gradients between the workers; by default the process group's, if there is one.
        world_size: the number of workers; by default of processes.

    Raises:
        UserError: if the training set does not fill one batch.

    Attributes:
        plan: what is about to happen. Its text is the line to print before the training.
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
        if is_distributed():
            backend = backend or dist.get_backend()
        keeps_blocks = False
        if device.type == "cpu" and args.allocator == "keep":
            keeps_blocks = keep_large_blocks().keeps_large_blocks
        self.args = args
        self.rank = get_rank()
        workers = world_size or get_world_size()
        self.plan = make_plan(args, train_set, test_set, device, backend, workers, keeps_blocks)
        self.meter = Meter(device, args.batch_size)
        self.loss_watch = LossWatch(device, self.rank)
        self.epoch = 0
        self._epoch_loss = EpochLoss(device)
        self._devices = devices or [device]

    @property
    def steps(self) -> int:
        """Optimizer steps done, those before a resumption included."""
        return self.meter.steps

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs, from 0 or from the epoch of the checkpoint that the run resumes from.

        They are as many as `--epochs` says, or as it takes to come to `--max-steps`. From the first one on, the peak of
        the GPUs' memory is measured anew.
        """
        reset_peak_memory(self._devices)
        while True:
            yield self.epoch
            if self.steps >= self.plan.total_steps:
                return
            self.epoch += 1
            self._epoch_loss.reset()

    def batches(self, loader: Iterable) -> Iterator:
        """The batches of one epoch's training, timed and shown on a terminal; ends early at `--max-steps`."""
        from tqdm import tqdm

        left = self.plan.micro_batches_left(self.epoch, self.steps)
        # None: silent where stderr is not a terminal.
        disable = None if self.rank == 0 else True
        self.meter.start()
        with tqdm(total=left, desc=self.plan.level, leave=False, disable=disable) as bar:
            for _, batch in zip(range(left), loader, strict=False):
                yield batch
                bar.update()
        self.meter.stop()

    def count(self, loss: Tensor) -> None:
        """Count a (micro-)batch that has been trained with `loss`, a scalar that stays on its device.

        Raises:
            UserError: if a loss is not finite. On a CPU this call looks at `loss` itself, on a GPU at earlier losses.
        """
        self.loss_watch.note(loss, self.steps + 1)
        self._epoch_loss.add(loss)
        if self._epoch_loss.micro_batches % self.plan.accumulation == 0:
            self.meter.step()

    def mean_loss(self) -> Tensor:
        """The mean of this process's training losses of this epoch, a float64 scalar on the device."""
        self.loss_watch.settle()
        return self._epoch_loss.mean()

    def demand_finite(self, model: nn.Module) -> None:
        """Raise UserError unless the losses so far and the weights of `model` are finite. This waits for the device."""
        self.loss_watch.settle()
        demand_finite_weights(model, self.steps)

    def prepare_checkpoint(self, model: nn.Module) -> None:
        """Call this before a checkpoint: it refuses to save what is not finite, and averages the ranks' losses.

        A checkpoint holds rank 0's state of this object, which must then be good for all ranks. This is a collective:
        all processes must call it.

        Raises:
            UserError: if a loss or a weight is not finite.
        """
        self.demand_finite(model)
        self._epoch_loss.average_over_ranks()

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, and what it was asked to do."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "seconds": self.meter.seconds,
            "loss_total": self._epoch_loss.total.item(),
            "micro_batches": self._epoch_loss.micro_batches,
            "accumulation": self.plan.accumulation,
            "identity": self.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a run that was asked to do the same; UserError names what differs."""
        self.check_identity(state["identity"])
        self.epoch = state["epoch"]
        self.meter.resume(state["steps"], state["seconds"])
        # With another number of micro-batches per step each of them counts for more, or for less.
        per_micro_batch = self.plan.accumulation / state["accumulation"]
        self._epoch_loss.micro_batches = round(state["micro_batches"] * per_micro_batch)
        self._epoch_loss.total.fill_(state["loss_total"] * per_micro_batch)

    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resumption."""
        return {
            "level": self.plan.level,
            "dataset": self.plan.dataset,
            "training samples": self.plan.train_samples,
            "batch size": self.plan.batch_size,
            "learning rate": self.args.lr,
            "seed": self.args.seed,
        }

    def check_identity(self, saved: dict[str, Any]) -> None:
        """Raise UserError, naming what differs, unless `saved` is what `identity` says of this run."""
        for name, ours in self.identity().items():
            theirs = saved.get(name)
            if theirs != ours:
                run = f"a run with {name} {theirs}, not {ours}"
                fail(f"the checkpoint in {self.args.checkpoint_dir} is of {run}")

    def peak_memory_bytes(self) -> list[int]:
        """The peak of the memory that this process has allocated on its devices: one entry per GPU, none on a CPU."""
        return peak_memory_bytes(self._devices)

    def result(
        self, train_loss: Tensor | float, totals: Tensor, peaks_of_ranks: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """The result, with the keys of the ladder's contract. UserError if the evaluation's loss is not finite.

        Args:
            train_loss: the last epoch's mean loss over all ranks.
            totals: float64 [loss sum, correct, samples] of the last evaluation over all ranks.
            peaks_of_ranks: `peak_memory_bytes` of every rank; by default there is this one only.
        """
        peaks: list[int] = []
        for peaks_of_rank in peaks_of_ranks or [self.peak_memory_bytes()]:
            peaks += peaks_of_rank
        return make_result(self.args, self.plan, self.meter, train_loss, totals, peaks)

    def report(self, result: dict[str, Any], model: nn.Module) -> None:
        """Print the result, and write it and the weights where `--json` and `--save` say. One process calls it.

        Args:
            model: the bare network, without any wrapper; its state dict is what `--save` writes.
        """
        print(result_line(result), flush=True)
        if self.args.save:
            write_weights(self.args.save, model)
        if self.args.json:
            write_json(self.args.json, result)
