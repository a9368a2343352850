"""Whatever somebody put into a checkpoint's folder, nothing outside of it is read or changed."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from common.accelerator import Accelerator
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration
from tests.states import forget_states

FORBIDDEN_WEIGHT = 666.0
FILES = ["manifest.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl"]
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


def project_at(root: Path) -> tuple[Accelerator, torch.nn.Linear]:
    forget_states()
    naming = ProjectConfiguration(str(root / "project"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=naming, cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model


def forge(folder: Path, outside: Path, draw: random.Random) -> None:
    """Another name, a link or a folder, where a checkpoint has a file of its own."""
    way = draw.choice(["name", "name", "link", "folder"])
    if way == "name":
        (folder / "link").symlink_to(outside)
        manifest = json.loads((folder / "manifest.json").read_text())
        entry = manifest["files"].pop(draw.choice(FILES[1:]))
        manifest["files"][draw.choice(EVIL_NAMES).format(outside=outside)] = entry
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return
    name = draw.choice([*FILES, ".complete", f"../.{folder.name}.draft", "../.checkpoint_9.draft"])
    (folder / name).unlink(missing_ok=True)
    if way == "link":
        (folder / name).symlink_to(outside / name if name in FILES else outside)
    else:
        (folder / name).mkdir()
        (folder / name / "link").symlink_to(outside)


def use(accelerator: Accelerator, folder: Path, draw: random.Random) -> None:
    """Load, resume or save, as a script would."""
    way = draw.choice(["load one", "load one", "load newest", "save", "save over"])
    if way == "load one":
        accelerator.load_state(folder)
    elif way == "load newest":
        accelerator.load_state()
    elif way == "save":
        accelerator.project_configuration.iteration = 9
        accelerator.save_state()
    else:
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator.save_state(folder)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.skipif(os.name == "nt", reason="makes symbolic links")
@pytest.mark.parametrize("number", [60, pytest.param(1500, marks=pytest.mark.long)])
def test_no_forged_folder_reaches_outside_of_itself(number, tmp_path):
    project = tmp_path / "project"
    outside = tmp_path / "outside"
    accelerator, model = project_at(tmp_path)
    torch.nn.init.constant_(model.weight, FORBIDDEN_WEIGHT)
    accelerator.save_state()
    (project / "checkpoints/checkpoint_0").rename(outside)
    torch.nn.init.constant_(model.weight, 1.0)
    accelerator.save_state()
    accelerator.save_state()
    before = contents(outside)
    shutil.copytree(project, tmp_path / "original")
    refused = 0
    for seed in range(number):
        draw = random.Random(seed)
        folder = project / "checkpoints" / draw.choice(["checkpoint_1", "checkpoint_2"])
        forge(folder, outside, draw)
        accelerator, model = project_at(tmp_path)
        try:
            use(accelerator, folder, draw)
        except CheckpointError:
            refused += 1
        assert contents(outside) == before, f"seed {seed}"
        assert not (model.weight == FORBIDDEN_WEIGHT).any(), f"seed {seed}"
        shutil.rmtree(project)
        shutil.copytree(tmp_path / "original", project)
    assert refused > number / 8
