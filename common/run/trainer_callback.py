"""From a Trainer, of whichever library, to the report of a run: a callback that counts, and the result from the logs.

A script that has no result to report, and no ranks that must stop at the same step, does not need this file.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.data.loading import check_same_dataset
from common.process_group import all_gather_object, get_rank
from common.run.checkpointing import Checkpointing
from common.run.run import Run


class LadderCallback:
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
        """What a checkpoint keeps of this callback; the Trainer sets the attributes again when it resumes."""
        return {"args": {}, "attributes": {"saved_identity": self.saved_identity}}

    @property
    def saved_identity(self) -> dict[str, Any]:
        """What the run was asked to do. The Trainer sets this from a checkpoint, before it reports that it resumes.

        Raises:
            UserError: where it is set, if the checkpoint's run was asked to do something else.
        """
        return self.run.identity()

    @saved_identity.setter
    def saved_identity(self, identity: dict[str, Any]) -> None:
        # This sets nothing. The Trainer restores attributes by setattr; this is our only chance to compare.
        self.run.check_identity(identity)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        check_same_dataset(all_gather_object(self.dataset))
        self.run.meter.resume(state.global_step, 0.0)
        self._loss_hook = model.register_forward_hook(self._watch)

    def _watch(self, model: nn.Module, inputs: Any, log_probs: Tensor) -> None:
        # No event of a Trainer gets the loss. The loss is a mean of log-probabilities, those of the targets, so it is
        # finite where all log-probabilities are. If one of them is not, neither is their sum.
        if model.training:
            self.run.loss_watch.note(log_probs.detach().sum(), self.run.steps + 1)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.run.meter.step()
        self.checkpoints.ask_all_ranks(state.global_step)
        if self.checkpoints.is_due(state.global_step):
            control.should_save = True
        if control.should_save:
            self.run.demand_finite(model)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoints.exit_if_preempted(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.meter.stop()
        self.run.loss_watch.settle()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._loss_hook is not None:
            self._loss_hook.remove()

    def __getattr__(self, name: str) -> Callable[..., None]:
        # In place of deriving from one library's TrainerCallback: the other events do nothing.
        if name.startswith("on_"):
            return _do_nothing
        raise AttributeError(name)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def final_losses(log_history: list[dict]) -> tuple[float, Tensor]:
    """The last training loss in a Trainer's logs, and the last evaluation as [loss sum, correct, samples]."""
    last_values: dict[str, Any] = {}
    for entry in log_history:
        last_values |= entry
    means = torch.tensor([last_values["eval_loss"], last_values["eval_accuracy"], 1], dtype=torch.float64)
    return last_values["loss"], means * last_values["eval_evaluated"]


def finish(run: Run, model: nn.Module, log_history: list[dict]) -> dict[str, Any]:
    """The result of a Trainer's run, which rank 0 prints and writes. A collective: all processes must call it."""
    train_loss, totals = final_losses(log_history)
    peaks_of_ranks = all_gather_object(run.peak_memory_bytes())
    result = run.result(train_loss, totals, peaks_of_ranks)
    if get_rank() == 0:
        run.report(result, model)
    return result
