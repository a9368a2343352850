"""From a Trainer, of whichever library, to the report of a run: a callback that counts, and the result from the logs.

A script that has no result to report, and no ranks that must stop at the same step, does not need this file.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.data.loading import check_same_dataset
from common.process_group import all_gather_object, get_rank
from common.run.checkpointing import Checkpointing
from common.run.run import Run
from common.trainer.callbacks import TrainerCallback


class LadderCallback(TrainerCallback):
    """Does for a Trainer what the scripts of the other levels do in their loops.

    It counts and times training without evaluation, notices a loss that is not finite, saves where all ranks must
    stop, and refuses to resume a run that was asked to do something else.

    Args:
        run: of this process.
        checkpoints: when to save.
        dataset: what this rank trains on, as `DigitImages.description` says it; all ranks must have the same.
    """

    def __init__(self, run: Run, checkpoints: Checkpointing, dataset: str) -> None:
        self.run = run
        self.checkpoints = checkpoints
        self.dataset = dataset
        self._loss_hook: RemovableHandle | None = None

    def state(self) -> dict[str, dict[str, Any]]:
        """The part of this callback that a checkpoint keeps: the progress of the run, and its identity."""
        return {"args": {}, "attributes": {"run": self.run.state_dict()}}

    def load_state(self, attributes: dict[str, Any]) -> None:
        """Continue the run of a checkpoint; UserError if it was asked to do something else."""
        self.run.load_state_dict(attributes["run"])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        check_same_dataset(all_gather_object(self.dataset))
        if self.run.steps != state.global_step:  # transformers keeps no state of this callback
            self.run.meter.resume(state.global_step, 0.0)
        self._loss_hook = model.register_forward_hook(self._watch)
        self.run.begin()

    def _watch(self, model: nn.Module, inputs: Any, log_probs: Tensor) -> None:
        # No event of a Trainer gets the loss. The loss is a mean of log-probabilities, those of the targets, so it is
        # finite where all log-probabilities are. If one of them is not, neither is their sum.
        if model.training:
            self.run.loss_watch.note(log_probs.detach().sum(), self.run.steps + 1)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.run.meter.step()
        self.run.log_progress()
        self.checkpoints.ask_all_ranks(state.global_step)
        if self.checkpoints.is_due(state.global_step, state.max_steps):
            control.should_save = True
        if control.should_save:
            self.run.demand_finite(model)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoints.report_saved(state.global_step)
        self.checkpoints.exit_if_preempted(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.meter.stop()
        self.run.loss_watch.settle()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loss_hook is not None:
            self._loss_hook.remove()


def finish(run: Run, model: nn.Module, log_history: list[dict]) -> dict[str, Any]:
    """The result of a Trainer's run, which rank 0 prints and writes. A collective: all processes must call it.

    Args:
        log_history: of the Trainer; the last training loss and the last evaluation in it count.
    """
    last_values: dict[str, Any] = {}
    for entry in log_history:
        last_values |= entry
    means = torch.tensor([last_values["eval_loss"], last_values["eval_accuracy"], 1], dtype=torch.float64)
    totals = means * last_values["eval_evaluated"]
    result = run.result(last_values["loss"], totals, all_gather_object(run.peak_memory_bytes()))
    if get_rank() == 0:
        run.report(result, model)
    return result
