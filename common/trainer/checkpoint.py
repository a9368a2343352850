"""Checkpoints: `checkpoint-<step>/` folders that are complete as soon as they have that name.

The accelerator saves and loads weights, optimizer, scheduler, gradient scaler, each rank's random state and the
loader's position, and verifies them all. The Trainer adds `trainer_state.json`, which is that of `transformers`, and
`progress.json`, with all else that it needs to go on exactly.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.accelerator import Accelerator
from common.accelerator.remote_errors import run_on_all_ranks
from common.accelerator.utils import broadcast, broadcast_object_list, is_peft_model, load_state_dict
from common.accelerator.utils.checkpoint_folder import finish_and_verify
from common.accelerator.utils.checkpoint_history import numbered, recover_newest, remove_folder
from common.accelerator.utils.constants import SAFE_WEIGHTS_NAME
from common.accelerator.utils.random import get_random_states, set_random_states
from common.accelerator.utils.weights import under_names_of
from common.trainer import loading, pretrained
from common.trainer.progress import Plan
from common.trainer.trainer_callback import TrainerState

TRAINER_STATE_NAME = "trainer_state.json"
PROGRESS_NAME = "progress.json"
PREFIX = "checkpoint-"


def checkpoint_folder(output_dir: str, step: int) -> Path:
    return Path(output_dir, f"{PREFIX}{step}")


def save(trainer: Any, output_dir: str, calls_save_model: bool) -> None:
    """Save everything that a run needs to go on, and delete the oldest checkpoints. All ranks call this."""
    state = trainer.state
    progress = trainer.progress
    folder = checkpoint_folder(output_dir, state.global_step)
    progress.saved_steps.append(state.global_step)
    if state.best_global_step in progress.saved_steps:  # else a folder of its name is another run's
        best = checkpoint_folder(output_dir, state.best_global_step)
        if best == folder or best.exists():  # else it lies where the run was resumed from
            state.best_model_checkpoint = str(best)
    state.stateful_callbacks = trainer.callback_handler.states(trainer.control)
    # Nothing is left to train on in an epoch that a callback cuts short.
    is_cut_short = trainer.control.should_epoch_stop and not progress.epoch_ended
    batches = progress.plan.batches_per_epoch if is_cut_short else progress.batches
    content = {
        "position": {"epoch": progress.epoch, "batches": batches, "epoch_ended": progress.epoch_ended},
        "order": progress.plan.order_settings,
        "loss_log": progress.loss_log.state_dict(trainer.accelerator),
        "saved_steps": progress.saved_steps,
    }

    def write_own_files(models: list, weights: list[dict], draft: str) -> None:
        write_model_files(trainer, weights, draft, calls_save_model)
        if trainer.is_world_process_zero():
            state.save_to_json(f"{draft}/{TRAINER_STATE_NAME}")
            Path(draft, PROGRESS_NAME).write_text(json.dumps(content), encoding="utf-8")

    # The hook is called before the manifest is written, so that the manifest lists the Trainer's files too.
    with trainer.accelerator.register_save_state_pre_hook(write_own_files):
        trainer.accelerator.save_state(folder, all_ranks=True, with_optimizers=not trainer.args.save_only_model)
    if trainer.args.save_total_limit is not None:
        kept = [folder, Path(state.best_model_checkpoint or folder)]
        surplus = partial(delete_oldest, output_dir, progress.saved_steps, kept, trainer.args.save_total_limit)
        run_on_all_ranks(surplus, trainer.is_world_process_zero())


def write_model_files(trainer: Any, weights: list[dict], draft: str, calls_save_model: bool) -> None:
    """Write the model's files into the folder `draft`, except the `weights`, which are left to the accelerator.

    It replaces a `model.safetensors` of an override by these, which a resumed run loads.
    """
    model = trainer.model
    if calls_save_model:
        trainer.save_model(draft, _internal_call=True)
    elif trainer.is_world_process_zero():
        # `save_pretrained` gets no weights and writes the configuration only. But the weights of adapters have a file
        # of their own, for `from_pretrained`, which it has to write.
        has_adapters = hasattr(model, "peft_config")
        pretrained.save(trainer, model, draft, weights[0] if has_adapters else {})
    has_adapter_files = trainer.is_world_process_zero() and any(Path(draft).rglob("adapter_model.*"))
    if has_adapter_files and is_peft_model(model) and not trainer.is_fsdp_enabled:
        weights.clear()  # The model inside is frozen, and may be large.


class ResumePoint(NamedTuple):
    """The place at which a run goes on, as in `Progress`, and whether it is the one that was saved."""

    epoch: int
    batches: int
    is_in_place: bool


def find_resume_point(saved: dict[str, Any], global_step: int, plan: Plan) -> ResumePoint:
    """The place at which a run with this plan goes on; that of the first two rows is *in place*.

    saved                               the run goes on at               gradients and their losses
    at a step's end                     that place                       are none
    where an epoch ended or was cut     the next epoch's beginning       of an incomplete window are kept
    where it was stopped in a step      the beginning of that step       are dropped
    with another order of samples       the end of as many whole steps   are dropped
    """
    if saved["order"] != plan.order_settings:  # all epochs are taken to be whole ones, as in `transformers`
        epoch, steps = divmod(global_step, plan.steps_per_epoch)
        return ResumePoint(epoch, steps * plan.accumulation, is_in_place=False)
    epoch = saved["position"]["epoch"]
    batches = saved["position"]["batches"]
    if plan.ends_step(batches):
        return ResumePoint(epoch, batches, is_in_place=True)
    return ResumePoint(epoch, batches - batches % plan.accumulation, is_in_place=False)


def resume(trainer: Any, folder: str) -> loading.SkippedBatches | None:
    """Go on from a checkpoint; returns the batches that are to be skipped in the first epoch, or None.

    The random states are the saved ones, so a run draws other numbers in a step that was stopped.
    """
    accelerator = trainer.accelerator
    progress = trainer.progress
    state = run_on_all_ranks(lambda: TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}"))
    saved = run_on_all_ranks(lambda: json.loads(Path(folder, PROGRESS_NAME).read_text(encoding="utf-8")))
    point = find_resume_point(saved, state.global_step, progress.plan)
    trainer.state.go_on_from(state)
    trainer.callback_handler.restore(state.stateful_callbacks)
    progress.epoch = point.epoch
    progress.batches = point.batches
    progress.epoch_ended = saved["position"]["epoch_ended"]
    progress.saved_steps = saved["saved_steps"]
    progress.loss_log.load_state_dict(saved["loss_log"], accelerator, keeps_gradients=point.is_in_place)

    # A prepared loader has a position of its own in a checkpoint. Any other, and one that goes back, begins a pass.
    loader_goes_on = point.is_in_place and loading.is_prepared(trainer.train_dataloader)
    states_of_start = get_random_states(accelerator.device)
    with accelerator.register_load_state_pre_hook(partial(load_adapters, trainer.model)):
        accelerator.load_state(folder, with_loaders=loader_goes_on)
    if not point.is_in_place:
        trainer.model_wrapped.zero_grad()
    if loader_goes_on or not 0 < point.batches < progress.plan.batches_per_epoch:
        return None
    # Reading the skipped batches draws random numbers too, so it begins with the states that a run starts with.
    saved_states = get_random_states(accelerator.device)
    set_random_states(accelerator.device, states_of_start)
    return loading.SkippedBatches(point.batches, random_states_after=saved_states)


def load_adapters(model: nn.Module, models: list, folder: str) -> None:
    """Load the weights of a checkpoint that has adapters alone, and leave no `models` to the accelerator."""
    if has_adapters_alone(model, folder):
        pretrained.load_adapters(model, folder)
        models.clear()


def delete_oldest(output_dir: str, saved_steps: list[int], kept: list[Path], limit: int) -> None:
    """Delete the oldest checkpoints until `limit` are left, but none of `kept`.

    The checkpoints of `saved_steps` are this run's. Those of other runs count as older, and a lower step as older than
    a higher one. The times that the disk has for them may be wrong.
    """
    found = list(reversed(numbered(Path(output_dir), PREFIX)))  # from the lowest step to the highest
    of_this_run = {checkpoint_folder(output_dir, step) for step in saved_steps}
    of_others = [path for path in found if path not in of_this_run]
    oldest_first = [*of_others, *(path for path in found if path in of_this_run)]
    dispensable = [path for path in oldest_first if path not in kept]
    surplus = max(0, len(found) - limit)
    for path in dispensable[:surplus]:
        remove_folder(path)


def get_last_checkpoint(output_dir: str) -> str | None:
    """The checkpoint of the highest step in `output_dir`, or None."""
    found = numbered(Path(output_dir), PREFIX)
    return str(found[0]) if found else None


def find_checkpoint(accelerator: Accelerator, output_dir: str, wanted: str | bool | None) -> str | None:
    """The checkpoint `wanted`, verified; True is the newest in `output_dir` that is whole. All ranks must call this."""
    if not wanted:
        return None
    if wanted is True:
        found = run_on_all_ranks(lambda: str(recover_newest(Path(output_dir), PREFIX)), accelerator.is_main_process)
        return broadcast_object_list([found])[0]
    run_on_all_ranks(lambda: finish_and_verify(Path(wanted)), accelerator.is_main_process)
    return wanted


def has_adapters_alone(model: nn.Module, folder: str) -> bool:
    """True for a checkpoint with the weights of a PEFT model's adapters, and not with those of the model inside."""
    return not Path(folder, SAFE_WEIGHTS_NAME).exists() and is_peft_model(model)


def load_best_model(accelerator: Accelerator, model: nn.Module, folder: str) -> None:
    """Load the weights of a checkpoint, after verifying them. All ranks must call this.

    The main process reads them and sends them to the others, whose machine may not see its disk. Adapters each reads.
    """
    if has_adapters_alone(model, folder):
        run_on_all_ranks(lambda: finish_and_verify(Path(folder)), accelerator.is_main_process)
        run_on_all_ranks(lambda: pretrained.load_adapters(model, folder))
        return
    saved = run_on_all_ranks(lambda: _read_weights(model, folder), accelerator.is_main_process)
    for name, weight in model.state_dict().items():
        if isinstance(weight, Tensor):
            # One at a time: all of them may not fit on the device. Under FSDP the shape is that of the whole weight.
            whole = torch.empty(weight.shape, dtype=weight.dtype, device=accelerator.device)
            if accelerator.is_main_process:
                whole.copy_(saved[name])
            model.load_state_dict({name: broadcast(whole)}, strict=False)


def _read_weights(model: nn.Module, folder: str) -> dict[str, Tensor]:
    """The weights in a checkpoint, on the CPU, under the names that the model has for them."""
    finish_and_verify(Path(folder))
    weights = under_names_of(model, load_state_dict(f"{folder}/model.safetensors"))
    for name, weight in model.state_dict().items():
        if isinstance(weight, Tensor) and name not in weights:
            raise ValueError(f"{folder}/model.safetensors has no weight {name}")
    return weights
