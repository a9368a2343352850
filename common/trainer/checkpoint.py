"""Checkpoints: `checkpoint-<step>/` folders that are complete as soon as they have that name.

The accelerator saves and loads weights, optimizer, scheduler, gradient scaler, each rank's random state and the
loader's position; the Trainer adds `trainer_state.json`.
"""

import re
import shutil
from pathlib import Path

from common.accelerator import Accelerator
from common.accelerator.checkpointing import draft
from common.trainer.callbacks import TrainerState

TRAINER_STATE_NAME = "trainer_state.json"


def checkpoint_path(output_dir: str, step: int) -> Path:
    return Path(output_dir) / f"checkpoint-{step}"


def save_checkpoint(accelerator: Accelerator, state: TrainerState, output_dir: str, limit: int | None) -> None:
    """Save a checkpoint of `state.global_step`, then delete the oldest beyond `limit`. All ranks must call this.

    It is written under another name and renamed when it is complete, so that whatever is called `checkpoint-<step>`
    can be loaded, wherever the process was killed. What a killed one left, the next one sweeps.
    """
    path = checkpoint_path(output_dir, state.global_step)
    partial = draft(path.parent) if accelerator.is_main_process else path
    accelerator.save_state(str(partial))
    if accelerator.is_main_process:
        state.save_to_json(str(partial / TRAINER_STATE_NAME))
        if path.exists():
            _delete(path, partial)
        partial.rename(path)
        found, keep = list_checkpoints(output_dir), {str(path), state.best_model_checkpoint}
        surplus = max(0, len(found) - limit) if limit else 0
        for old in [each for each in found if str(each) not in keep][:surplus]:
            _delete(old, partial)
    accelerator.wait_for_everyone()


def get_last_checkpoint(output_dir: str) -> str | None:
    """The checkpoint of the highest step in `output_dir`, or None."""
    return max(map(str, list_checkpoints(output_dir)), key=_step, default=None)


def find_checkpoint(args, wanted: str | bool | None) -> str | None:
    """The checkpoint `wanted`, by default by `args`; True is the newest. ValueError if there is none."""
    wanted = args.resume_from_checkpoint if wanted is None else wanted
    path = get_last_checkpoint(args.output_dir) if wanted is True else wanted
    if wanted and not (path and Path(path, TRAINER_STATE_NAME).is_file()):
        raise ValueError(f"there is no complete checkpoint to resume from: {path or args.output_dir}")
    return path or None


def list_checkpoints(output_dir: str) -> list[Path]:
    """The checkpoints in `output_dir`, the oldest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, _step(path)))


def _delete(path: Path, partial: Path) -> None:
    # Renamed first: half a checkpoint must not bear a checkpoint's name. To one that the next save sweeps, as drafts.
    doomed = partial.with_name(f".{path.name}{partial.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _step(path: Path | str) -> int:
    return int(str(path).rpartition("-")[2])
