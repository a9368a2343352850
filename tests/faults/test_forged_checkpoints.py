"""Nothing outside of a checkpoint's folder is read or changed, whatever somebody put into it."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from common.accelerator import Accelerator
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration
from tests.states import forget_states

pytestmark = pytest.mark.skipif(os.name == "nt", reason="makes symbolic links")
FORBIDDEN_WEIGHT = 666.0
# Names for a file in a manifest; `{outside}` is what must not be reached.
EVIL_NAMES = [
    "{outside}/model.safetensors",
    "../../../outside/model.safetensors",
    "a/../../../../outside/model.safetensors",
    "link/model.safetensors",
    "link",
    "..",
    "",
    "a\0b",
    "x" * 5000,
]
FILES = ["manifest.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl"]
# What an interrupted save leaves beside the folder or in it; `{save}` is its id in the manifest.
UNFINISHED = [".main_part", "../.checkpoint_1.part_1_{save}", "../.checkpoint_9.draft_0", "../.checkpoint_9.removed"]


def name_in_manifest(name: str, folder: Path, outside: Path) -> None:
    (folder / "link").symlink_to(outside)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name.format(outside=outside)] = manifest["files"].pop("model.safetensors")
    (folder / "manifest.json").write_text(json.dumps(manifest))


def link(name: str, folder: Path, outside: Path) -> None:
    place = folder / name.format(save=json.loads((folder / "manifest.json").read_text())["save"])
    place.unlink(missing_ok=True)
    place.symlink_to(outside / name if name in FILES else outside)


def checkpoint(accelerator: Accelerator, number: int) -> Path:
    return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{number}")


def load_forged(accelerator: Accelerator) -> None:
    accelerator.load_state(checkpoint(accelerator, 1))


def load_newest(accelerator: Accelerator) -> None:
    accelerator.load_state()


def save_beside(accelerator: Accelerator) -> None:
    accelerator.project_configuration.iteration = 9
    accelerator.save_state()


def save_over(accelerator: Accelerator) -> None:
    accelerator.project_configuration.automatic_checkpoint_naming = False
    accelerator.save_state(checkpoint(accelerator, 1))


def make_project(root: Path, weight: float) -> tuple[Accelerator, torch.nn.Linear]:
    forget_states()
    naming = ProjectConfiguration(str(root / "project"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=naming, cpu=True)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, weight)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a project that has checkpoints 0 and 1, and with another checkpoint, outside of it."""
    root = tmp_path_factory.mktemp("saved")
    accelerator, _ = make_project(root, FORBIDDEN_WEIGHT)
    accelerator.save_state()
    checkpoint(accelerator, 0).rename(root / "outside")
    accelerator, _ = make_project(root, 1.0)
    accelerator.save_state()
    accelerator.save_state()
    return root


def open_forged(saved: Path, root: Path, forge: Callable, name: str) -> tuple[Accelerator, torch.nn.Linear]:
    """An Accelerator and a model on a copy of the project, in which the newest checkpoint has been forged."""
    shutil.copytree(saved, root, dirs_exist_ok=True)
    accelerator, model = make_project(root, 2.0)
    forge(name, checkpoint(accelerator, 1), root / "outside")
    return accelerator, model


def parameter_id(value: Callable | str) -> str:
    return repr(value[:20]) if isinstance(value, str) else value.__name__


REFUSED = [(name_in_manifest, name) for name in EVIL_NAMES] + [(link, name) for name in FILES]
FORGERIES = REFUSED + [(link, name) for name in UNFINISHED]


@pytest.mark.parametrize("use", [load_forged, load_newest, save_beside, save_over])
@pytest.mark.parametrize(("forge", "name"), FORGERIES, ids=parameter_id)
def test_no_forged_folder_reaches_outside_of_itself(forge, name, use, saved, tmp_path):
    accelerator, model = open_forged(saved, tmp_path, forge, name)
    before = contents(tmp_path / "outside")
    with suppress(CheckpointError):
        use(accelerator)
    assert contents(tmp_path / "outside") == before
    assert not (model.weight == FORBIDDEN_WEIGHT).any()


@pytest.mark.parametrize(("forge", "name"), REFUSED, ids=parameter_id)
def test_loading_a_forged_folder_is_refused(forge, name, saved, tmp_path):
    accelerator, _ = open_forged(saved, tmp_path, forge, name)
    with pytest.raises(CheckpointError):
        load_forged(accelerator)
