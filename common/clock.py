"""Between a Trainer, whichever library it is from, and the report of a run: what to count, and what to read off.

A script that has no result to report, and no ranks to stop together, does without."""

import contextlib

import torch


class Clock:
    """Does for a Trainer what `common.report.Run` does in the loops of the other levels: counts and times training
    without evaluation, notices a loss that is not finite, and stops where all ranks were told to."""

    def __init__(self, run) -> None:
        self.run, self.meter = run, run.meter
        self._until_the_end = contextlib.ExitStack()

    def on_train_begin(self, args, state, control, model, **kwargs) -> None:
        self.meter.resume(state.global_step, 0.0)
        self._until_the_end.enter_context(self.run.listening())
        self._until_the_end.callback(model.register_forward_hook(self._watch).remove)

    def _watch(self, model, inputs, log_probs) -> None:
        # No event of a Trainer gets the loss. Its mean over the targets is finite where all log-probabilities are.
        if model.training:
            self.run.losses.note(log_probs.detach().sum(), self.meter.steps + 1)

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.meter.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.meter.step()
        control.should_save |= args.save_strategy == "steps" and self.run.stop.here(state.global_step)
        if control.should_save:
            self.run.demand_finite()

    def on_save(self, args, state, control, **kwargs) -> None:
        if self.run.stop.agreed:
            self._until_the_end.close()
            self.run.stop.leave(state.global_step)

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        self.meter.stop()
        self.run.losses.settle()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._until_the_end.close()

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
