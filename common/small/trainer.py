"""A Trainer on four pages: the loop of level 03 as an object, on the small Accelerator.

`Trainer.train` is the loop. After every step it asks the callbacks what is to be done now: log, evaluate, save or stop.
The names and defaults are those of transformers' Trainer. `common.trainer` is the whole one, and trains the example of
level 04's page to the same weights, to the last bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

from common.files import atomic_write
from common.small.accelerator import (
    Accelerator,
    DataLoaderConfiguration,
    DataLoaderShard,
    InitProcessGroupKwargs,
    set_seed,
)


@dataclass
class TrainingArguments:
    """The settings of a training. Steps are optimizer steps."""

    output_dir: str  # for checkpoints
    max_steps: int
    remove_unused_columns: bool  # False: the collator gets whole samples. Only the whole Trainer can do the other.
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    learning_rate: float = 5e-5  # of the first step; it falls along a line, to 0 after the last one
    max_grad_norm: float = 1.0
    seed: int = 42
    logging_steps: int = 500
    save_steps: int = 500
    eval_strategy: str = "no"  # or "steps"
    eval_steps: int = 500


@dataclass
class TrainerState:
    """The progress of a training."""

    global_step: int = 0
    epoch: float = 0.0  # 1.5: in the middle of the second one
    logged_step: int = 0  # when the loss was last logged
    log_history: list[dict] = field(default_factory=list)


@dataclass
class TrainerControl:
    """The things to do after this step. Callbacks set them."""

    should_log: bool = False
    should_evaluate: bool = False
    should_save: bool = False
    should_training_stop: bool = False


class TrainerCallback:
    """Two events of a training, told on all ranks. Override those that you need."""

    def on_step_end(self, args, state, control, **kwargs):
        """The optimizer has stepped."""

    def on_log(self, args, state, control, *, logs, **kwargs):
        """`logs` has been logged: the training loss or the metrics of an evaluation."""


class DefaultFlowCallback(TrainerCallback):
    """The first callback: logs, evaluates, saves and stops as the settings say."""

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        is_last = step >= args.max_steps
        control.should_log = step % args.logging_steps == 0
        control.should_evaluate = args.eval_strategy == "steps" and (is_last or step % args.eval_steps == 0)
        control.should_save = is_last or step % args.save_steps == 0
        control.should_training_stop = is_last


class Trainer:
    """Trains `model` on every rank. A subclass says what the loss of a batch is.

    Args:
        data_collator: makes a batch, a dict of tensors, of a list of samples.
        callbacks: called after the DefaultFlowCallback.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        data_collator: Callable[[list], Any],
        train_dataset: Any,
        eval_dataset: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        if args.remove_unused_columns:
            raise NotImplementedError("only the whole Trainer removes columns: set remove_unused_columns=False")
        if args.max_steps < 1 or args.eval_strategy not in ("no", "steps"):
            raise NotImplementedError("only the whole Trainer counts in epochs: set max_steps and eval_steps")
        config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed)
        timeout = InitProcessGroupKwargs(timedelta(minutes=30))
        self.accelerator = Accelerator(cpu=False, dataloader_config=config, kwargs_handlers=[timeout])
        set_seed(args.seed, device_specific=False)

        self.model = model.to(self.accelerator.device)
        self.args = args
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.callbacks = [DefaultFlowCallback(), *callbacks]
        self.state = TrainerState()
        self.control = TrainerControl()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: max(0.0, (args.max_steps - step) / args.max_steps))
        # Of this rank, over the steps since the last log. It stays on the device: to read it, the CPU would wait.
        self.loss_sum = torch.zeros((), device=self.accelerator.device)

    def compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """The mean loss of a batch."""
        raise NotImplementedError

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Train up to `max_steps`, from the first step or from where a checkpoint was saved."""
        loader = self.make_loader(self.train_dataset, self.args.per_device_train_batch_size, shuffle=True)
        model, loader = self.accelerator.prepare(self.model, loader)
        if resume_from_checkpoint is not None:
            self.load_checkpoint(resume_from_checkpoint)

        for inputs in self.batches_of_all_epochs(loader):
            model.train()
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            if self.args.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            learning_rate = self.scheduler.get_last_lr()[0]
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.loss_sum += loss.detach()
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / len(loader)

            self.call_event("on_step_end")
            if self.control.should_log:
                self.log({"loss": self.take_mean_loss(), "learning_rate": learning_rate})
            if self.control.should_evaluate:
                self.evaluate()
            if self.control.should_save:
                self.save_checkpoint()
            if self.control.should_training_stop:
                break

    def make_loader(self, dataset: Any, per_device_batch_size: int, shuffle: bool = False) -> DataLoader:
        """A loader of the batches of all ranks."""
        batch_size = per_device_batch_size * self.accelerator.num_processes
        return DataLoader(dataset, batch_size, shuffle, collate_fn=self.data_collator)

    def batches_of_all_epochs(self, loader: DataLoaderShard) -> Iterator[Any]:
        """This rank's batches, epoch after epoch, beginning with the one after the last step."""
        while self.state.global_step < self.args.max_steps:
            epoch, steps_done = divmod(self.state.global_step, len(loader))
            loader.set_epoch(epoch)
            random_state = self.generator.get_state()
            batches = iter(loader)
            for _ in range(steps_done):
                next(batches)
            if steps_done > 0:  # resumed: what was skipped may have drawn, and dropout goes on as the checkpoint says
                self.generator.set_state(random_state)
            yield from batches

    def evaluate(self) -> dict[str, float]:
        """Log and return the mean loss over `eval_dataset`, in which each sample counts once."""
        accelerator = self.accelerator
        # A prepared loader would repeat samples, so that all ranks have as many: here each rank has its own alone.
        own = range(accelerator.process_index, len(self.eval_dataset), accelerator.num_processes)
        samples = Subset(self.eval_dataset, own)
        totals = torch.zeros(2, device=accelerator.device)
        self.model.eval()
        for inputs in DataLoader(samples, self.args.per_device_eval_batch_size, collate_fn=self.data_collator):
            inputs = {name: tensor.to(accelerator.device) for name, tensor in inputs.items()}
            with torch.no_grad():
                loss = self.compute_loss(self.model, inputs)
            rows = len(next(iter(inputs.values())))
            totals += torch.stack([loss * rows, torch.full_like(loss, rows)])
        loss_sum, num_samples = accelerator.reduce(totals, "sum")
        metrics = {"eval_loss": float(loss_sum / num_samples)}
        self.log(metrics)
        return metrics

    def take_mean_loss(self) -> float:
        """The mean loss of the steps since the last log, over all ranks."""
        steps = self.state.global_step - self.state.logged_step
        mean_sum = self.accelerator.reduce(self.loss_sum, "mean")
        self.loss_sum.zero_()
        self.state.logged_step = self.state.global_step
        return float(mean_sum) / steps

    def log(self, logs: dict[str, Any]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        if self.accelerator.is_main_process:
            print(logs)
        self.call_event("on_log", logs=logs)

    def call_event(self, event: str, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, **kwargs)

    @property
    def generator(self) -> torch.Generator:
        """The generator of dropout. As in transformers all ranks seed theirs alike and draw equally often.

        Level 02 calls that a mistake: all ranks drop the same units. Level 04 seeds each rank by itself.
        """
        device = self.accelerator.device
        return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]

    def save_checkpoint(self) -> None:
        """Write what `load_checkpoint` needs to `checkpoint-<step>.pt` in the output directory."""
        checkpoint = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "state": asdict(self.state),
            "loss_sum": self.accelerator.reduce(self.loss_sum, "mean"),
            "random_state": self.generator.get_state(),
        }
        if self.accelerator.is_main_process:
            path = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}.pt")
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as draft:  # whole or not there, if the process is killed
                torch.save(checkpoint, draft)

    def load_checkpoint(self, path: str) -> None:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.state = TrainerState(**checkpoint["state"])
        self.loss_sum.copy_(checkpoint["loss_sum"])
        self.generator.set_state(checkpoint["random_state"])

    def end(self) -> None:
        self.accelerator.end_training()
