"""Callbacks that show a run: plain lines, a progress bar, and trackers. Only rank 0 shows."""

import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from common.accelerator import Accelerator, PartialState
from common.trainer.arguments import TrainingArguments
from common.trainer.callbacks import TrainerCallback
from common.trainer.loading import length_of
from common.trainer.state import TrainerState


def say(text: str) -> None:
    """Print `text` above the bar, at once: what is killed later has said it."""
    tqdm.write(text)
    sys.stdout.flush()


def training_summary(args: TrainingArguments, state: TrainerState, model: nn.Module, train_dataloader: Any) -> str:
    """A few lines on the training that is about to begin."""
    num_processes = PartialState().num_processes
    total_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes
    num_examples = length_of(getattr(train_dataloader, "dataset", None))
    trainable = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    lines = [
        "***** Running training *****",
        f"  Num examples = {'unknown' if num_examples is None else num_examples}",
        f"  Num epochs = {state.num_train_epochs}",
        f"  Batch size per device = {args.per_device_train_batch_size}",
        f"  Total batch size = {total_batch}",
        f"  Gradient accumulation steps = {args.gradient_accumulation_steps}",
        f"  Total optimization steps = {state.max_steps}",
        # A process uses one device, however many it sees.
        f"  Number of processes = {num_processes} ({torch.cuda.device_count()} GPUs visible)",
        f"  Trainable parameters = {sum(trainable)}",
    ]
    if state.global_step > 0:
        lines.append(f"  Resumed at step = {state.global_step}")
    return "\n".join(lines)


def _shortened(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def log_line(logs: dict[str, Any]) -> str:
    """The logged values in one line, with four digits of each number: "loss 1.464 | learning_rate 0.001"."""
    return " | ".join(f"{name} {_shortened(value)}" for name, value in logs.items())


def table_row(args: TrainingArguments, state: TrainerState, metrics: dict[str, Any]) -> dict[str, str]:
    """One row of the table of evaluations: epoch or step, training loss, validation loss, metrics."""
    row = {}
    if args.eval_strategy == "steps":
        row["Step"] = str(state.global_step)
    else:
        row["Epoch"] = f"{state.epoch:g}"
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    row["Training Loss"] = f"{losses[-1]:.6f}" if losses else "No log"
    for name, value in metrics.items():
        if name != "epoch" and not name.endswith(("_runtime", "_per_second", "_preparation_time")):
            title = name.removeprefix("eval_").replace("_", " ").title().replace("Loss", "Validation Loss")
            row[title] = f"{value:.6f}" if isinstance(value, float) else str(value)
    return row


class PrinterCallback(TrainerCallback):
    """Plain lines: a summary, what is logged, and a table that grows by a row with each evaluation."""

    columns: tuple[str, ...] = ()

    def on_train_begin(self, args, state, control, **kwargs):
        self.columns = ()
        if state.is_world_process_zero:
            say(training_summary(args, state, kwargs["model"], kwargs["train_dataloader"]))

    def on_log(self, args, state, control, logs, **kwargs):
        if args.disable_tqdm:
            # As in the original: what `train` returns then lacks it too.
            logs.pop("total_flos", None)
        if state.is_world_process_zero and ("loss" in logs or "train_runtime" in logs):
            say(log_line(logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if not state.is_world_process_zero:
            return
        row = table_row(args, state, metrics)
        if tuple(row) != self.columns:
            self.columns = tuple(row)
            self.say_row(row)
        self.say_row(row.values())

    def say_row(self, cells: Iterable[str]) -> None:
        """Add a row to the table, or its titles."""
        padded = []
        for column, cell in zip(self.columns, cells, strict=True):
            width = max(15, len(column))
            padded.append(cell.rjust(width))
        say("  ".join(padded))


class ProgressCallback(PrinterCallback):
    """A bar on the terminal with loss, learning rate and time left, above it the summary and the table."""

    bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if state.is_world_process_zero:
            # It redraws itself ten times a second at most: otherwise a step costs it a comparison.
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update()

    def on_log(self, args, state, control, logs, **kwargs):
        if self.bar is not None and "loss" in logs:
            # What a script logs itself has no learning rate.
            shown = {name: _shortened(logs[name]) for name in ("loss", "learning_rate") if name in logs}
            self.bar.set_postfix(shown, refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()


class TrackerCallback(TrainerCallback):
    """Hands what is logged to the accelerator's trackers, as `train/…`, `eval/…` and `test/…`, and the arguments."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.started = False

    def on_train_begin(self, args, state, control, **kwargs):
        # A second training goes on in the same trackers: started again, they would write everything twice.
        if not self.started:
            settings = asdict(args).items()
            config = {name: value for name, value in settings if isinstance(value, bool | int | float | str)}
            self.accelerator.init_trackers(str(args.run_name), config=config)
            self.started = True

    def on_log(self, args, state, control, logs, **kwargs):
        values = {_tracked_name(name): value for name, value in logs.items()}
        self.accelerator.log(values, step=state.global_step)


def _tracked_name(name: str) -> str:
    for split in ("eval", "test"):
        if name.startswith(f"{split}_"):
            return f"{split}/" + name.removeprefix(f"{split}_")
    return f"train/{name}"


def default_reporter(disable_tqdm: bool | None) -> TrainerCallback:
    """A bar, or plain lines with `disable_tqdm`; by default a bar where stderr is a terminal, and so in no notebook."""
    if disable_tqdm is None:
        disable_tqdm = not sys.stderr.isatty()
    return PrinterCallback() if disable_tqdm else ProgressCallback()
