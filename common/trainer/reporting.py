"""Callbacks that show a run: plain lines, a progress bar, a notebook's table, and trackers. Only rank 0 shows."""

import sys
from dataclasses import asdict
from html import escape

import torch
from torch.utils.data import IterableDataset
from tqdm import tqdm

from common.accelerator import Accelerator, PartialState
from common.trainer.callbacks import TrainerCallback


def say(text: str) -> None:
    """Print `text` above the bar, at once: what is killed later has said it."""
    tqdm.write(text)
    sys.stdout.flush()


def training_summary(args, state, model, train_dataloader) -> str:
    """What is about to be trained, in a few lines."""
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    processes, dataset = PartialState().num_processes, train_dataloader.dataset
    size = "unknown" if isinstance(dataset, IterableDataset) else len(dataset)
    # A process uses one device, however many it sees.
    gpus, trainable = torch.cuda.device_count(), sum(p.numel() for p in model.parameters() if p.requires_grad)
    resumed = f"\n  Resumed at step = {state.global_step}" if state.global_step else ""
    return (
        f"***** Running training *****\n  Num examples = {size}\n  Num epochs = {state.num_train_epochs}\n"
        f"  Batch size per device = {batch}\n  Total batch size = {batch * accumulation * processes}\n"
        f"  Gradient accumulation steps = {accumulation}\n  Total optimization steps = {state.max_steps}\n"
        f"  Number of processes = {processes} ({gpus} GPUs visible)\n  Trainable parameters = {trainable}{resumed}"
    )


def table_row(args, state, metrics: dict[str, float]) -> dict[str, str]:
    """One row of the table of evaluations: epoch or step, training loss, validation loss, metrics."""
    losses = [f"{entry['loss']:.6f}" for entry in state.log_history if "loss" in entry]
    row = {"Step": str(state.global_step)} if args.eval_strategy == "steps" else {"Epoch": f"{state.epoch:g}"}
    row["Training Loss"] = losses[-1] if losses else "No log"
    for name, value in metrics.items():
        if name != "epoch" and not name.endswith(("_runtime", "_per_second")):
            title = name.removeprefix("eval_").replace("_", " ").title().replace("Loss", "Validation Loss")
            row[title] = f"{value:.6f}" if isinstance(value, float) else str(value)
    return row


class PrinterCallback(TrainerCallback):
    """Plain lines: a summary, what is logged, and a table that grows by a row with each evaluation."""

    columns: tuple[str, ...] = ()

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self.columns = ()
        if state.is_world_process_zero:
            say(training_summary(args, state, model, train_dataloader))

    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and ("loss" in logs or "train_runtime" in logs):
            say(str({name: f"{v:.4g}" if isinstance(v, float) else v for name, v in logs.items()}))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.is_world_process_zero:
            row = table_row(args, state, metrics)
            if tuple(row) != self.columns:
                self.columns = tuple(row)
                say("  ".join(name.rjust(15) for name in row))
            say("  ".join(row[name].rjust(max(15, len(name))) for name in row))


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
            self.bar.set_postfix({n: f"{logs[n]:.4g}" for n in ("loss", "learning_rate")}, refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()


class NotebookProgressCallback(TrainerCallback):
    """A progress bar and the growing table of evaluations, redrawn in place in a notebook's output."""

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        from IPython.display import HTML, display

        self.rows, self.html = [], HTML
        if state.is_world_process_zero:
            say(training_summary(args, state, model, train_dataloader))
            self.output = display(HTML(self.page(state)), display_id=True)

    def page(self, state) -> str:
        bar = f"<progress value='{state.global_step}' max='{state.max_steps}' style='width:300px'></progress>"
        progress = f"<p>{bar} {state.global_step}/{state.max_steps}, epoch {state.epoch:.2f}</p>"
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [dict(zip(columns, columns, strict=True)), *self.rows] if self.rows else []
        cells = ("".join(f"<td>{escape(line.get(name, ''))}</td>" for name in columns) for line in lines)
        return f"{progress}<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"

    def redraw(self, state) -> None:
        if state.is_world_process_zero:
            self.output.update(self.html(self.page(state)))

    def on_step_end(self, args, state, control, **kwargs):
        # A drawing takes longer than many a step: two hundred have to do.
        if state.global_step % max(1, state.max_steps // 200) == 0:
            self.redraw(state)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.max_steps:
            self.rows.append(table_row(args, state, metrics))
            self.redraw(state)


class TrackerCallback(TrainerCallback):
    """Hands what is logged to the accelerator's trackers, as `train/…` and `eval/…`, and the arguments as config."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def on_train_begin(self, args, state, control, **kwargs):
        config = {name: v for name, v in asdict(args).items() if isinstance(v, bool | int | float | str)}
        self.accelerator.init_trackers(args.run_name, config=config)

    def on_log(self, args, state, control, logs, **kwargs):
        values = {f"eval/{n[5:]}" if n.startswith("eval_") else f"train/{n}": value for n, value in logs.items()}
        self.accelerator.log(values, step=state.global_step)


def default_reporter(disable_tqdm: bool | None) -> TrainerCallback:
    """The callback that fits where the process runs: notebook, terminal, or (and with `disable_tqdm`) neither."""
    # Where IPython runs it has been imported.
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    notebook = "IPKernelApp" in getattr(ipython, "config", ())
    if disable_tqdm or (disable_tqdm is None and not (notebook or sys.stderr.isatty())):
        return PrinterCallback()
    return NotebookProgressCallback() if notebook else ProgressCallback()
