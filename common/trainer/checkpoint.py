"""Checkpoints: `checkpoint-<step>/` folders that are complete as soon as they have that name.

The accelerator saves and loads weights, optimizer, scheduler, gradient scaler, each rank's random state and the
loader's position, and verifies them all; the Trainer adds `trainer_state.json`.
"""

import shutil
from pathlib import Path

from common.accelerator import Accelerator
from common.accelerator.checkpointing import draft, newest, numbered, together
from common.accelerator.utils import broadcast_object_list
from common.trainer.callbacks import TrainerState

TRAINER_STATE_NAME, PREFIX = "trainer_state.json", "checkpoint-"


def save_checkpoint(accelerator: Accelerator, state: TrainerState, output_dir: str, limit: int | None) -> None:
    """Save a checkpoint of `state.global_step`, then delete the oldest beyond `limit`. All ranks must call this.

    It is written under another name and renamed when it is complete, so that the newest `checkpoint-<step>` can be
    loaded, wherever the process was killed. What a killed one left, the next one sweeps.
    """
    path, main = Path(output_dir, f"{PREFIX}{state.global_step}"), accelerator.is_main_process
    partial = draft(path.parent) if main else path

    def add_state(models, weights, folder: str) -> None:  # before all is put into the manifest
        together(lambda: state.save_to_json(f"{folder}/{TRAINER_STATE_NAME}"), main)

    def publish() -> None:
        shutil.rmtree(path, ignore_errors=True)  # of another run
        partial.rename(path)
        found = sorted(numbered(path.parent, PREFIX), key=lambda path: path.stat().st_mtime_ns)
        keep = {str(path), state.best_model_checkpoint}
        surplus = max(0, len(found) - limit) if limit else 0
        for old in [each for each in found if str(each) not in keep][:surplus]:
            old.rename(doomed := draft(path.parent))  # half a checkpoint must not bear a checkpoint's name
            shutil.rmtree(doomed)

    with accelerator.register_save_state_pre_hook(add_state):
        accelerator.save_state(str(partial))
    together(publish, main)


def get_last_checkpoint(output_dir: str) -> str | None:
    """The checkpoint of the highest step in `output_dir`, or None."""
    return next(map(str, numbered(Path(output_dir), PREFIX)), None)


def find_checkpoint(accelerator: Accelerator, args, wanted: str | bool | None) -> str | None:
    """The checkpoint `wanted`, by default by `args`; True is the newest that is whole. All ranks must call this."""
    wanted = args.resume_from_checkpoint if wanted is None else wanted
    if wanted is True:
        found = together(lambda: str(newest(Path(args.output_dir), PREFIX)), accelerator.is_main_process)
        wanted = broadcast_object_list([found])[0]
    return wanted or None
