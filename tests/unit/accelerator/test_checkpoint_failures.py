"""A save that is refused, or fails on some process, leaves what was there, no part of its own, and nobody waiting."""

import os
from pathlib import Path
from shutil import copytree
from unittest import mock

import pytest
import torch

from common.accelerator import Accelerator
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration
from common.processes import ranks
from tests.states import on_a_rank
from tests.unit.accelerator.several_processes import on_ranks


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    return accelerator


@pytest.mark.parametrize("folder", ["new", "old"])
def test_a_folder_has_its_name_when_it_is_whole_and_a_save_that_fails_leaves_nothing(folder, accelerator, tmp_path):
    (tmp_path / "old").mkdir()

    def hook(models, weights, draft):
        assert not (tmp_path / "new").exists()
        raise KeyError(draft)

    accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(KeyError):
        accelerator.save_state(tmp_path / folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_save_state_names_what_is_in_its_way_and_the_old_checkpoint_stays(accelerator, tmp_path):
    folder = accelerator.save_state(tmp_path / "c")
    (folder / "pytorch_model.bin").mkdir()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a folder"):
        accelerator.save_state(folder, safe_serialization=False)
    (folder / "pytorch_model.bin").rmdir()
    (folder / "model.bin").touch()
    (tmp_path / "new/manifest.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"manifest\.json is a folder"):
        accelerator.save_state(tmp_path / "new")
    hook = accelerator.register_save_state_pre_hook(lambda _, weights, draft: copytree(folder, draft + "/model.bin"))
    with pytest.raises(CheckpointError, match=r"model\.bin/.* cannot be made: there is a file"):
        accelerator.save_state(folder, safe_serialization=False)
    hook.remove()
    hook = accelerator.register_save_state_pre_hook(lambda _, weights, draft: Path(draft, "manifest_1.json").touch())
    with pytest.raises(CheckpointError, match=r"manifest_1\.json has the name of a manifest"):
        accelerator.save_state(folder)
    hook.remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, draft: Path(draft, "link").symlink_to(tmp_path))
    with pytest.raises(CheckpointError, match="link is a symbolic link"):  # It may lead to another file when loaded.
        accelerator.save_state(folder)
    accelerator.load_state(folder)
    assert not list(tmp_path.rglob(".*"))


def save_and_load(accelerator: Accelerator, folder: Path, failing: str) -> str:
    """The error on this process, where the part of it that is called `failing` raises on the last rank."""

    def take_part(part: str) -> None:
        if part == failing and accelerator.is_last_process:
            raise OSError(part)

    class Registered:
        def state_dict(self) -> dict:
            take_part("state_dict")
            return {}

        def load_state_dict(self, state: dict) -> None:
            take_part("load_state_dict")

    accelerator.register_for_checkpointing(Registered())
    accelerator.register_save_state_pre_hook(lambda models, weights, draft: take_part("save hook"))
    accelerator.register_load_state_pre_hook(lambda models, draft: take_part("load hook"))
    try:
        accelerator.save_state(folder, all_ranks=True)
        accelerator.load_state(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("failing", ["save hook", "state_dict", "load hook", "load_state_dict"])
def test_checkpoint_hooks_and_objects_that_fail_on_one_rank_raise_on_all_and_leave_no_draft(failing, tmp_path):
    errors = on_ranks(3, save_and_load, tmp_path / "c", failing)
    assert errors == [f"RemoteError: rank 2: OSError: {failing}"] * 2 + [f"OSError: {failing}"]
    assert not list(tmp_path.glob(".*"))


@on_a_rank
def saved_from_two_folders(folder: Path) -> list[str]:
    """Two machines whose checkpoint folders have different paths; each writes and reads its own."""
    own = folder / f"machine {os.environ['RANK']}"
    own.mkdir()
    config = ProjectConfiguration(project_dir=own, automatic_checkpoint_naming=True, save_on_each_node=True)
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        accelerator = Accelerator(project_config=config, cpu=True)
    model = accelerator.unwrap_model(accelerator.prepare(torch.nn.Linear(1, 1)))
    accelerator.save_state()
    with torch.no_grad():
        model.weight.fill_(7.0)
    accelerator.load_state()
    assert model.weight.item() != 7.0
    return sorted(path.name for path in (own / "checkpoints/checkpoint_0").iterdir())


def test_machines_that_save_for_themselves_may_have_different_folders(tmp_path):
    first, second = ranks(2).run(saved_from_two_folders, tmp_path)
    assert first == ["manifest.json", "model.safetensors", "random_states_0.pkl"]
    assert second == ["manifest.json", "model.safetensors", "random_states_1.pkl"]
