"""Callbacks that show a run: plain lines, a progress bar, and trackers. Only rank 0 shows."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.accelerator import Accelerator, PartialState
from common.trainer.loading import length_of, samples_per_batch
from common.trainer.trainer_callback import TrainerCallback, TrainerState
from common.trainer.training_args import TrainingArguments


def print_above_bar(text: str) -> None:
    tqdm.write(text)
    sys.stdout.flush()  # the line is there even if the run is killed


def print_summary(args: TrainingArguments, state: TrainerState, train_dataloader: Any) -> None:
    """Print a line on the training that is about to begin."""
    num_processes = PartialState().num_processes
    batch_size = samples_per_batch(train_dataloader, num_processes) * args.gradient_accumulation_steps
    num_examples = length_of(getattr(train_dataloader, "dataset", None))
    examples = "unknown" if num_examples is None else num_examples
    resumed = f"; resumed at step {state.global_step}" if state.global_step else ""
    print_above_bar(
        f"Running training: {examples} examples, steps {state.global_step} to {state.max_steps} of {batch_size} each; "
        f"processes with one device each: {num_processes}, GPUs visible: {torch.cuda.device_count()}{resumed}"
    )


def print_log(logs: dict[str, Any], max_str_len: int = sys.maxsize) -> None:
    print_above_bar(" | ".join(f"{name} {_shortened(value, max_str_len)}" for name, value in logs.items()))


def _shortened(value: Any, max_str_len: int = sys.maxsize) -> str:
    if isinstance(value, str) and len(value) > max_str_len:
        return f"[String too long to display, length: {len(value)} > {max_str_len}. Increase `max_str_len`.]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def metrics_lines(split: str, metrics: dict[str, Any]) -> str:
    """Metrics in aligned lines, as the original prints them: times as hours, minutes and seconds, four decimals."""
    shown = {name: _readable(name, metrics[name]) for name in sorted(metrics)}
    name_width = max(map(len, shown))
    value_width = max(map(len, shown.values()))
    lines = [f"***** {split} metrics *****"]
    lines += [f"  {name:<{name_width}} = {value:>{value_width}}" for name, value in shown.items()]
    return "\n".join(lines)


def _readable(name: str, value: Any) -> str:
    if "_runtime" in name:
        hundredths = int(value % 1 * 100)
        return f"{timedelta(seconds=int(value))}.{hundredths:02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return str(round(value, 4) if isinstance(value, float) else value)


def model_card(state: TrainerState, description: dict[str, Any]) -> str:
    """A page on a trained model, in Markdown: `description` as metadata, and the last of each result."""
    results: dict[str, Any] = {}
    for entry in state.log_history:
        results |= entry
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in description.items()), "---", ""]
    lines += [f"- {name}: {value}" for name, value in results.items()]
    return "\n".join(lines) + "\n"


class PrinterCallback(TrainerCallback):
    """Plain lines: a summary, and each log."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print_summary(args, state, kwargs["train_dataloader"])

    def on_log(self, args, state, control, logs, **kwargs):
        logs.pop("total_flos", None)  # as in the original; at the end `train` returns these logs
        if state.is_world_process_zero:
            print_log(logs)


class LinesCallback(PrinterCallback):
    """The same lines where nobody has asked for them. The original has a bar there, which leaves the logs alone."""

    def on_log(self, args, state, control, logs, **kwargs):
        super().on_log(args, state, control, logs.copy())


class ProgressCallback(TrainerCallback):
    """A bar on the terminal with loss, learning rate and time left, above it the summary and the evaluations."""

    training_bar: tqdm | None = None  # Subclasses write above it.
    prediction_bar = None  # No evaluation has one.
    max_str_len: int = 100  # A longer text in a log is replaced. A subclass may have an __init__ of its own.

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print_summary(args, state, kwargs["train_dataloader"])
            # It redraws itself ten times a second at most; in other steps it only compares two times.
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)
        self.current_step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_log(self, args, state, control, logs, **kwargs):
        if self.training_bar is not None and "loss" in logs:
            # The logs of a script itself have no learning rate.
            shown = {name: _shortened(logs[name]) for name in ("loss", "learning_rate") if name in logs}
            self.training_bar.set_postfix(shown, refresh=False)
        elif state.is_world_process_zero:
            print_log(logs, self.max_str_len)

    def on_train_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


class TrackerCallback(TrainerCallback):
    """Hands logs, as `train/…`, `eval/…` and `test/…`, and the arguments to the trackers of the accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def on_train_begin(self, args, state, control, **kwargs):
        # A second training goes on in the same trackers: started again, they would write everything twice.
        if not self.accelerator.trackers:
            settings = args.to_dict().items()
            config = {name: value for name, value in settings if isinstance(value, bool | int | float | str)}
            run_name = args.run_name or Path(args.output_dir).resolve().name
            self.accelerator.init_trackers(run_name, config=config)

    def on_log(self, args, state, control, logs, **kwargs):
        values = {}
        for name, value in logs.items():
            split, _, rest = name.partition("_")
            tracked = f"{split}/{rest}" if split in ("eval", "test") else f"train/{name}"
            values[tracked] = value
        self.accelerator.log(values, step=state.global_step)


def default_reporter(disable_tqdm: bool | None) -> TrainerCallback:
    """A bar, or plain lines with `disable_tqdm`; by default a bar where stderr is a terminal, and so in no notebook."""
    if disable_tqdm is None and not sys.stderr.isatty():
        return LinesCallback()
    return PrinterCallback() if disable_tqdm else ProgressCallback()
