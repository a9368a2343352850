"""Checkpoints: `checkpoint-<step>/` folders that are complete as soon as they have that name.

The accelerator saves and loads weights, optimizer, scheduler, gradient scaler, each rank's random state and the
loader's position, and verifies them all. The Trainer adds `trainer_state.json`, which is that of `transformers`, and
`progress.json`, with all else that it needs to go on exactly.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.accelerator import Accelerator
from common.accelerator.operations import run_on_all_ranks
from common.accelerator.utils import broadcast, broadcast_object_list, is_peft_model, load_state_dict
from common.accelerator.utils.checkpoint_folder import finish_and_verify, numbered, recover_newest, remove_folder
from common.accelerator.utils.constants import SAFE_WEIGHTS_NAME
from common.accelerator.utils.random import get_random_states, set_random_states
from common.accelerator.utils.weights import under_names_of
from common.trainer import loading, pretrained
from common.trainer.trainer_callback import TrainerState

TRAINER_STATE_NAME = "trainer_state.json"
PROGRESS_NAME = "progress.json"
PREFIX = "checkpoint-"


def checkpoint_folder(output_dir: str, step: int) -> Path:
    return Path(output_dir, f"{PREFIX}{step}")


def save(trainer: Any, output_dir: str, calls_save_model: bool) -> None:
    """Save everything that a run needs to go on, and delete the oldest checkpoints. All ranks call this."""
    state = trainer.state
    folder = checkpoint_folder(output_dir, state.global_step)
    saved_steps = trainer.progress.saved_steps
    saved_steps.append(state.global_step)
    note_best(state, folder, saved_steps)
    state.stateful_callbacks = trainer.callback_handler.states(trainer.control)
    progress = trainer.progress.state_dict(trainer.accelerator, trainer.control.should_epoch_stop)
    # The hook is called before the manifest is written, so that the manifest lists the Trainer's files too.
    write_files = partial(write_own_files, trainer, progress, calls_save_model)
    with trainer.accelerator.register_save_state_pre_hook(write_files):
        trainer.accelerator.save_state(folder, all_ranks=True)
    if trainer.args.save_total_limit is not None:
        kept = [folder, Path(state.best_model_checkpoint or folder)]
        surplus = partial(delete_oldest, output_dir, saved_steps, kept, trainer.args.save_total_limit)
        run_on_all_ranks(surplus, trainer.is_world_process_zero())


def note_best(state: TrainerState, newest: Path, saved_steps: list[int]) -> None:
    """Note this run's checkpoint of its best step, if there is one; the folder `newest` is about to be written."""
    if state.best_global_step not in saved_steps:  # a folder of that name is another run's
        return
    best = checkpoint_folder(str(newest.parent), state.best_global_step)
    if best == newest or best.exists():  # else it lies where the run was resumed from
        state.best_model_checkpoint = str(best)


def write_own_files(
    trainer: Any, progress: dict[str, Any], calls_save_model: bool, models: list, weights: list[dict], draft: str
) -> None:
    """Write the files of a checkpoint that are not the accelerator's into the folder `draft`.

    The accelerator then replaces a `model.safetensors` of an override by the weights, which a resumed run loads.
    """
    model = trainer.model
    if calls_save_model:
        trainer.save_model(draft, _internal_call=True)
    elif trainer.is_world_process_zero():
        # The accelerator writes the weights, so `save_pretrained` gets none and writes the configuration only. But
        # the weights of adapters have a file of their own, for `from_pretrained`, which it has to write.
        has_adapters = hasattr(model, "peft_config")
        pretrained.save(trainer, model, draft, weights[0] if has_adapters else {})
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(f"{draft}/{TRAINER_STATE_NAME}")
        Path(draft, PROGRESS_NAME).write_text(json.dumps(progress), encoding="utf-8")
        has_adapter_files = any(Path(draft).rglob("adapter_model.*"))
        if has_adapter_files and is_peft_model(model) and not trainer.is_fsdp_enabled:
            weights.clear()  # The model inside is frozen, and may be large.


def resume(trainer: Any, folder: str) -> loading.SkippedBatches | None:
    """Go on from a checkpoint; returns the batches that are to be skipped in the first epoch, or None.

    `Plan.goes_on_in_place` has a table of the cases. A prepared loader has a position of its own in a checkpoint. Any
    other loader, and one that goes back, begins a pass. Within an epoch it does so with the random states of this run's
    start, because reading draws random numbers too; after the skipped batches come the saved states.
    """
    accelerator = trainer.accelerator
    plan = trainer.progress.plan
    state, progress = run_on_all_ranks(lambda: read_progress(folder))
    trainer.state.go_on_from(state)
    trainer.callback_handler.restore(state.stateful_callbacks)
    trainer.progress.load_state_dict(progress, state.global_step, accelerator)
    is_in_place = plan.goes_on_in_place(progress)
    loader_goes_on = is_in_place and loading.is_prepared(trainer.train_dataloader)
    states_of_start = get_random_states(accelerator.device)
    with accelerator.register_load_state_pre_hook(partial(load_adapters_alone, trainer.model)):
        accelerator.load_state(folder, with_loaders=loader_goes_on)
    if not is_in_place:
        trainer.model_wrapped.zero_grad()
    batches_done = trainer.progress.batches
    if loader_goes_on or not 0 < batches_done < plan.batches_per_epoch:
        return None
    saved_states = get_random_states(accelerator.device)
    set_random_states(accelerator.device, states_of_start)
    return loading.SkippedBatches(batches_done, random_states_after=saved_states)


def read_progress(folder: str) -> tuple[TrainerState, dict[str, Any]]:
    """State and progress in a checkpoint that `find_checkpoint` has found."""
    state = TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}")
    return state, json.loads(Path(folder, PROGRESS_NAME).read_text(encoding="utf-8"))


def load_adapters_alone(model: nn.Module, models: list, folder: str) -> None:
    """Load the adapters of a checkpoint that has no other weights, and leave the accelerator the rest."""
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
    others = [path for path in found if path not in of_this_run]
    own = [path for path in found if path in of_this_run]
    surplus = max(0, len(found) - limit)
    dispensable = [path for path in others + own if path not in kept]
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
