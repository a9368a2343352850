"""Between a Trainer, whichever library it is from, and the report of a run: what to count, and what to read off.

Only measuring needs this; a script that has no result to report does without."""

import torch


class Clock:
    """Counts and times training without evaluation, as `common.report.Run.batches` does in the other levels."""

    def __init__(self, meter) -> None:
        self.meter = meter

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.meter.resume(state.global_step, 0.0)

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.meter.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.meter.step()

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.meter.stop()

    def __getattr__(self, name: str):
        # In place of deriving from one library's TrainerCallback: the other events do nothing.
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


def last_epoch(log_history: list[dict]) -> tuple[float, torch.Tensor]:
    """From a Trainer's logs the last training loss, and the last evaluation as [loss sum, correct, samples]."""
    logs = {name: value for entry in log_history for name, value in entry.items()}
    shares = torch.tensor([logs["eval_loss"], logs["eval_accuracy"], 1], dtype=torch.float64)
    return logs["loss"], shares * logs["eval_evaluated"]
