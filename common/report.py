"""What a run says about itself: the plan before, progress and throughput meanwhile, the result after."""

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.claim import claim, explain_errors
from common.data import agree
from common.errors import fail
from common.finite import LossWatch, demand_finite_weights
from common.stopping import Stop

WARM_UP_STEPS = 10


class Meter:
    """Steps, training time without evaluation, and steady-state throughput.

    The steady state begins after WARM_UP_STEPS steps of this process; fewer steps are measured as a whole. The device
    is synchronised before a clock is read, which happens once at the warm-up's end and twice an epoch.
    """

    def __init__(self, device: torch.device, images_per_step: int) -> None:
        self.device = device
        self.images_per_step = images_per_step
        self.steps = 0
        self.seconds = 0.0
        self._resumed_steps = 0
        self._resumed_seconds = 0.0
        self._steady_seconds = 0.0
        self._steady_since: float | None = None

    def resume(self, steps: int, seconds: float) -> None:
        """Go on from what another process has counted."""
        self.steps = self._resumed_steps = steps
        self.seconds = self._resumed_seconds = seconds

    def start(self) -> None:
        """An epoch's training begins."""
        self._began = self._now()
        if self._own_steps >= WARM_UP_STEPS:
            self._steady_since = self._began

    def step(self) -> None:
        """One optimizer step has been taken."""
        self.steps += 1
        if self._own_steps == WARM_UP_STEPS:
            self._steady_since = self._now()

    def stop(self) -> None:
        """The epoch's training has ended; what follows, such as evaluation, is not counted."""
        now = self._now()
        self.seconds += now - self._began
        if self._steady_since is not None:
            self._steady_seconds += now - self._steady_since
            self._steady_since = None

    @property
    def images_per_sec(self) -> float:
        steps, seconds = self._own_steps - WARM_UP_STEPS, self._steady_seconds
        if steps <= 0:
            steps, seconds = self._own_steps, self.seconds - self._resumed_seconds
        return steps * self.images_per_step / seconds if seconds else 0.0

    @property
    def _own_steps(self) -> int:
        return self.steps - self._resumed_steps

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class Run:
    """One run of one level: prints the plan, counts what is trained, ends in the result.

    Of several ranks only the first prints and writes.

    Args:
        args: of `common.args.parse_args`.
        train_set, test_set: of `common.data.load_data`.
        device: of this process; at level 01 of the first replica.
        backend: what carries the gradients between the workers; by default the process group's, if there is one.
        world_size: the number of workers; by default of processes.
    """

    def __init__(
        self,
        args,
        train_set,
        test_set,
        device: torch.device,
        *,
        backend: str | None = None,
        world_size: int = 1,
    ) -> None:
        self.args = args
        self.device = device
        self.rank, self.backend, self.world_size = 0, backend, world_size
        self.distributed = dist.is_available() and dist.is_initialized()
        if self.distributed:
            self.rank, self.backend, self.world_size = dist.get_rank(), dist.get_backend(), dist.get_world_size()
        agree(train_set)  # again for level 04, whose processes do not know each other when they load
        self.dataset = train_set.name
        self.accumulation = getattr(args, "gradient_accumulation_steps", 1)
        self.steps_per_epoch = len(train_set) // args.batch_size
        if self.steps_per_epoch == 0:
            fail(f"{len(train_set)} training samples are fewer than one batch of {args.batch_size}")
        self.total_steps = self.steps_per_epoch * args.epochs
        if args.max_steps:
            self.total_steps = min(self.total_steps, args.max_steps)
        self.meter = Meter(device, args.batch_size)
        self.losses = LossWatch(device, self.rank)
        self._optimizer: torch.optim.Optimizer | None = None  # that steps, where checkpoints are made
        self.stop = Stop(device, self.rank, self.distributed)
        self.epoch = 0
        if getattr(args, "checkpoint_dir", None):
            self._claim = claim(args.checkpoint_dir, self.rank, self.distributed)
            explain_errors(args.checkpoint_dir)
        self._loss, self._losses = torch.zeros((), dtype=torch.float64, device=device), 0
        if device.type == "cuda":
            for index in self._cuda_devices():
                torch.cuda.reset_peak_memory_stats(index)
        if self.rank == 0:
            print(self._plan(len(train_set), len(test_set)), flush=True)

    def epochs(self) -> Iterator[int]:
        """0, 1, …: as many epochs as `--epochs` says, or as it takes to come to `--max-steps`."""
        with self.listening():
            while True:
                yield self.epoch
                if self.meter.steps >= self.total_steps:
                    return
                self.epoch += 1
                self._loss.zero_()
                self._losses = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it SIGTERM and Ctrl-C lead to a checkpoint, if there is a folder for it, before they end the run."""
        if not getattr(self.args, "checkpoint_dir", None):
            yield
            return
        noting = register_optimizer_step_post_hook(self._note_optimizer)
        try:
            with self.stop.listening():
                yield
        finally:
            noting.remove()

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._optimizer = optimizer

    def demand_finite(self) -> None:
        """Raise UserError unless the losses so far and the weights are finite: before a checkpoint."""
        self.losses.settle()
        if self._optimizer is not None:
            demand_finite_weights(self._optimizer, self.meter.steps)

    def batches(self, loader: Iterable) -> Iterator:
        """The batches of one epoch's training, timed and shown on a terminal; ends early at `--max-steps`."""
        from tqdm import tqdm

        last = min(self.steps_per_epoch * (self.epoch + 1), self.total_steps)
        left = (last - self.meter.steps) * self.accumulation
        # disable=None: silent where stderr is not a terminal.
        bar = tqdm(total=left, desc=self.args.level, leave=False, disable=None if self.rank == 0 else True)
        self.meter.start()
        with bar:
            for _, batch in zip(range(left), loader, strict=False):
                yield batch
                bar.update()
                if self.stop.agreed:
                    self.stop.leave(self.meter.steps)
        self.meter.stop()

    def count(self, loss: Tensor) -> None:
        """One (micro-)batch has been trained with this loss, a scalar that stays on its device.

        Reading it with `.item()` would make the CPU wait for the GPU at every step.
        """
        self.losses.note(loss, self.meter.steps + 1)
        self._loss += loss.detach()
        self._losses += 1
        if self._losses % self.accumulation == 0:
            self.meter.step()

    def mean_loss(self) -> Tensor:
        """The mean of this process's training losses of this epoch, a float64 scalar on the device."""
        self.losses.settle()
        return self._loss / self._losses

    def wants_checkpoint(self) -> bool:
        """Whether, with `--checkpoint-dir`, to save now: every `--checkpoint-every` steps, and where a run must stop.

        A collective if so: one rank's state of this object is saved for all, who agree on the mean of their losses.
        """
        args, steps = self.args, self.meter.steps
        if not args.checkpoint_dir or self._losses % self.accumulation:
            return False
        if not self.stop.here(steps) and steps % args.checkpoint_every:
            return False
        self.demand_finite()
        if self.distributed:
            dist.all_reduce(self._loss)
            self._loss /= self.world_size
        return True

    @property
    def can_resume(self) -> bool:
        """Whether `--checkpoint-dir` holds a checkpoint, whole or damaged."""
        from common.accelerator.checkpointing import holds_something

        folder = self.args.checkpoint_dir
        return bool(folder) and any(map(holds_something, Path(folder, "checkpoints").glob("checkpoint_*/")))

    def state_dict(self) -> dict:
        """How far the run is, and what it was asked to do."""
        progress = {"epoch": self.epoch, "steps": self.meter.steps, "seconds": self.meter.seconds}
        return progress | {
            "loss": self._loss.item(),
            "losses": self._losses / self.accumulation,
            "of": self._identity(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue a run that was asked to do the same; UserError names what differs."""
        for name, ours in self._identity().items():
            if state["of"][name] != ours:
                theirs = f"a run with {name} {state['of'][name]}, not {ours}"
                fail(f"the checkpoint in {self.args.checkpoint_dir} is of {theirs}")
        self.epoch = state["epoch"]
        self.meter.resume(state["steps"], state["seconds"])
        if self.rank == 0:
            print(f"{self.args.level}: resumed at step {self.meter.steps}", flush=True)
        self._losses = round(state["losses"] * self.accumulation)
        self._loss.fill_(state["loss"] / max(state["losses"], 1) * self._losses / self.accumulation)

    def _identity(self) -> dict:
        """What must not change between a checkpoint and its resumption."""
        return {
            "level": self.args.level,
            "dataset": self.dataset,
            "batch size": self.args.batch_size,
            "seed": self.args.seed,
            "steps per epoch": self.steps_per_epoch,
        }

    def result(self, model: nn.Module, train_loss: Tensor | float, totals: Tensor) -> dict:
        """Print, write and return the result.

        Args:
            model: the bare network, without any wrapper; its state dict is what `--save` writes.
            train_loss: the last epoch's mean loss over all ranks.
            totals: float64 [loss sum, correct, samples] of the last evaluation over all ranks.
        """
        loss_sum, correct, evaluated = totals.tolist()
        if not math.isfinite(loss_sum):
            fail(f"loss is not finite ({loss_sum}) in the evaluation after step {self.meter.steps}")
        peaks = self._peak_memory_bytes()
        result = {
            "level": self.args.level,
            "dataset": self.dataset,
            "device": str(self.device.type),
            "backend": self.backend,
            "world_size": self.world_size,
            "global_batch_size": self.args.batch_size,
            "epochs": self.args.epochs,
            "steps": self.meter.steps,
            "seed": self.args.seed,
            "loss": float(train_loss),
            "eval_loss": loss_sum / evaluated,
            "accuracy": correct / evaluated,
            "evaluated": int(evaluated),
            "images_per_sec": round(self.meter.images_per_sec, 1),
            "seconds": round(self.meter.seconds, 3),
            "peak_memory_bytes": peaks,
            "memory_source": "measured" if peaks else None,
        }
        if self.rank == 0:
            print(result_line(result), flush=True)
            if self.args.save:
                # Into memory, for torch does not say why a file could not be written.
                torch.save({name: value.cpu() for name, value in model.state_dict().items()}, weights := io.BytesIO())
                _write(self.args.save, weights.getvalue())
            if self.args.json:
                _write(self.args.json, f"{json.dumps(result, indent=2)}\n".encode())
        return result

    def _plan(self, train_samples: int, test_samples: int) -> str:
        workers = f"{self.world_size} × {self.backend}" if self.backend else "1 process"
        threads = torch.get_num_threads()
        return (
            f"{self.args.level}: {workers} on {self.device.type}, {threads} thread{'s' if threads > 1 else ''} each | "
            f"{self.dataset} {train_samples} + {test_samples} | batch {self._split()} | {self.total_steps} steps"
        )

    def _split(self) -> str:
        """How the global batch is shared: '64 = 32 + 32', '64 = 22 + 22 + 20', '48 = 2 × 12 × 2 micro-batches'."""
        size, parts = self.args.batch_size, self.world_size
        if parts * self.accumulation == 1:
            return f"{size}"
        if self.accumulation > 1:
            return f"{size} = {parts} × {size // parts // self.accumulation} × {self.accumulation} micro-batches"
        return f"{size} = " + " + ".join(str(len(chunk)) for chunk in torch.empty(size).chunk(parts))

    def _cuda_devices(self) -> range:
        own = self.device.index if self.device.index is not None else torch.cuda.current_device()
        shared = self.backend == "DataParallel"
        return range(own, own + self.world_size) if shared else range(own, own + 1)

    def _peak_memory_bytes(self) -> list[int] | None:
        """The allocator's own peaks, one entry per device or rank, where the device keeps them."""
        if self.device.type != "cuda":
            return None
        peaks = [torch.cuda.max_memory_allocated(index) for index in self._cuda_devices()]
        if self.distributed:
            everyone: list = [None] * self.world_size
            dist.all_gather_object(everyone, peaks)
            peaks = [peak for ranks_peaks in everyone for peak in ranks_peaks]
        return peaks


def result_line(result: dict) -> str:
    return (
        f"{result['level']}: {result['dataset']} accuracy {result['accuracy']:.2%} of {result['evaluated']} | "
        f"loss {result['loss']:.4f}, eval loss {result['eval_loss']:.4f} | "
        f"{result['images_per_sec']:.0f} images/s | {result['steps']} steps in {result['seconds']:.1f} s"
    )


def _write(path: Path, content: bytes) -> None:
    """Complete or not at all: a reader never meets half a file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        fail(f"{path} cannot be written: {error}")
    finally:
        draft.unlink(missing_ok=True)
