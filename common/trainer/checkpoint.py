"""Checkpoints: `checkpoint-<step>/` folders that are complete as soon as they have that name.

The accelerator saves and loads weights, optimizer, scheduler, gradient scaler, each rank's random state and the
loader's position, and verifies them all. The Trainer adds `trainer_state.json`, which is that of `transformers`, and
`progress.json`, with all else that it needs to go on exactly.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.accelerator import Accelerator
from common.accelerator.operations import run_on_all_ranks
from common.accelerator.utils import broadcast, broadcast_object_list, is_peft_model, load_state_dict
from common.accelerator.utils.checkpoint_folder import finish_and_verify
from common.accelerator.utils.checkpoint_history import numbered, recover_newest, remove_folder
from common.accelerator.utils.constants import SAFE_WEIGHTS_NAME
from common.accelerator.utils.weights import under_names_of
from common.trainer import pretrained
from common.trainer.trainer_callback import TrainerState

TRAINER_STATE_NAME = "trainer_state.json"
PROGRESS_NAME = "progress.json"
PREFIX = "checkpoint-"


def checkpoint_folder(output_dir: str, step: int) -> Path:
    return Path(output_dir, f"{PREFIX}{step}")


def write_progress(folder: str, state: TrainerState, progress: dict[str, Any]) -> None:
    """Write what `read_progress` returns; `progress` has JSON values."""
    state.save_to_json(f"{folder}/{TRAINER_STATE_NAME}")
    Path(folder, PROGRESS_NAME).write_text(json.dumps(progress), encoding="utf-8")


def read_progress(folder: str) -> tuple[TrainerState, dict[str, Any]]:
    """State and progress in a checkpoint that `find_checkpoint` has found."""
    state = TrainerState.load_from_json(f"{folder}/{TRAINER_STATE_NAME}")
    return state, json.loads(Path(folder, PROGRESS_NAME).read_text(encoding="utf-8"))


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
