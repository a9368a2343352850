"""Nothing outside of a checkpoint's folder is read or changed, whatever somebody put into it."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from common.accelerator import Accelerator
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration
from tests.states import forget_states

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


def load(accelerator: Accelerator, folder: Path) -> None:
    accelerator.load_state(folder)


def load_newest(accelerator: Accelerator, folder: Path) -> None:
    accelerator.load_state()


def save(accelerator: Accelerator, folder: Path) -> None:
    accelerator.project_configuration.iteration = 9
    accelerator.save_state()


def save_over(accelerator: Accelerator, folder: Path) -> None:
    accelerator.project_configuration.automatic_checkpoint_naming = False
    accelerator.save_state(folder)


def project_at(root: Path, weight: float) -> tuple[Accelerator, torch.nn.Linear]:
    forget_states()
    naming = ProjectConfiguration(str(root / "project"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=naming, cpu=True)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, weight)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


FORGERIES = [(name_in_manifest, name) for name in EVIL_NAMES] + [(link, name) for name in FILES + UNFINISHED]


@pytest.mark.skipif(os.name == "nt", reason="makes symbolic links")
@pytest.mark.parametrize("use", [load, load_newest, save, save_over])
@pytest.mark.parametrize(
    ("forge", "name"), FORGERIES, ids=[f"{forge.__name__}-{name[:20]!r}" for forge, name in FORGERIES]
)
def test_no_forged_folder_reaches_outside_of_itself(forge, name, use, tmp_path):
    outside = tmp_path / "outside"
    accelerator, _ = project_at(tmp_path, FORBIDDEN_WEIGHT)
    accelerator.save_state()
    folder = tmp_path / "project/checkpoints/checkpoint_0"
    folder.rename(outside)
    accelerator, _ = project_at(tmp_path, 1.0)
    accelerator.save_state()
    accelerator.save_state()
    before = contents(outside)
    forge(name, folder.with_name("checkpoint_1"), outside)
    accelerator, model = project_at(tmp_path, 2.0)
    # Loading the forged folder must be refused. Saving, or loading the newest, may skip it.
    must_be_refused = use is load and name not in UNFINISHED
    with pytest.raises(CheckpointError) if must_be_refused else suppress(CheckpointError):
        use(accelerator, folder.with_name("checkpoint_1"))
    assert contents(outside) == before
    assert not (model.weight == FORBIDDEN_WEIGHT).any()
