"""A folder is a checkpoint or it is not; whatever it is, it is trusted in nothing but its own content."""

import json
import os
import re
from pathlib import Path
from shutil import copytree
from unittest import mock

import pytest
import torch

from common.accelerator import Accelerator, checkpointing
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import ProjectConfiguration, checkpoint_manifest
from tests.bits import cut_short, flip_a_bit
from tests.states import forget_states


@pytest.fixture
def model():
    return torch.nn.Linear(512, 300)  # 600 kB: 150 pages of the checksum


@pytest.fixture
def accelerator(model):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


def exchange_pages(path: Path) -> None:
    content = path.read_bytes()
    size = 2**12
    path.write_bytes(content[:size] + content[2 * size : 3 * size] + content[size : 2 * size] + content[3 * size :])


@pytest.mark.parametrize(
    ("name", "damage"),
    [("random_states_0.pkl", cut_short), ("optimizer.bin", flip_a_bit), ("model.safetensors", exchange_pages)],
)
def test_a_damaged_file_is_refused_by_name_and_nothing_is_loaded(name, damage, accelerator, model, tmp_path):
    folder = accelerator.save_state(tmp_path / "c")
    torch.nn.init.constant_(model.weight, 7)
    path = folder / name
    content = path.read_bytes()
    damage(path)
    with pytest.raises(CheckpointError, match=rf"{name} is not what was saved"):
        accelerator.load_state(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        accelerator.load_state(folder)
    assert (model.weight == 7).all()
    path.write_bytes(content)
    accelerator.load_state(folder)
    assert not (model.weight == 7).any()


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"format_version": 16, "files": ["a"]}'])
def test_a_damaged_manifest_is_refused_by_name_and_can_be_saved_over(content, accelerator, tmp_path):
    accelerator.save_state(tmp_path / "c")
    (tmp_path / "c/manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        accelerator.load_state(tmp_path / "c")
    accelerator.save_state(tmp_path / "c")  # A run is not lost because a file of before is.
    accelerator.load_state(tmp_path / "c")


def test_another_format_is_refused_in_a_line_that_names_folder_and_versions(accelerator, tmp_path):
    folder = accelerator.save_state(tmp_path / "c")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 11}))
    line = f"{folder} is a checkpoint in format 11; this code reads 16$"
    with pytest.raises(CheckpointError, match=line):
        accelerator.load_state(folder)


def test_other_files_in_the_folder_stay_and_only_those_of_the_manifest_are_read(accelerator, model, tmp_path):
    folder = accelerator.save_state(tmp_path / "c")
    accelerator.save_state(folder / "another")
    (folder / "note.txt").write_text("the user's")
    (folder / "manifest_notes.json").write_text("the user's")
    (folder / "manifest_1.json").write_text('{"format_version": 11}')  # of an older save
    torch.nn.init.constant_(model.weight, 7)
    accelerator.save_state(folder, safe_serialization=False)
    torch.nn.init.constant_(model.weight, 8)
    accelerator.load_state(folder)
    assert (model.weight == 7).all()
    assert (folder / "note.txt").read_text() == "the user's" and not list(folder.glob(".*"))
    accelerator.load_state(folder / "another")
    assert not (model.weight == 7).any()


def test_a_missing_folder_is_named(accelerator, tmp_path):
    with pytest.raises(ValueError, match=r"Tried to find .*nowhere but folder does not exist"):
        accelerator.load_state(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        accelerator.load_state(tmp_path / "file")
    with pytest.raises(ValueError, match="No input_dir"):
        accelerator.load_state()


def numbering(folder, **config):
    """An Accelerator of a new run, which numbers its checkpoints from 0."""
    forget_states()
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **config)
    return Accelerator(project_config=config, cpu=True)


def save_numbers(accelerator, numbers) -> None:
    accelerator.project_configuration.iteration = numbers[0]
    for _ in numbers:
        accelerator.save_state()


def kept(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_automatic_naming_keeps_the_newest_by_number(tmp_path):
    # https://github.com/huggingface/accelerate/issues/1163
    save_numbers(numbering(tmp_path, total_limit=2), range(12))
    assert kept(tmp_path) == {"checkpoint_10", "checkpoint_11"}


def test_a_new_run_loads_the_newest_and_goes_on_with_the_next_number(tmp_path):
    accelerator = numbering(tmp_path, total_limit=2)
    with pytest.raises(CheckpointError, match="no complete and undamaged checkpoint"):
        accelerator.load_state()
    save_numbers(accelerator, range(10, 12))
    accelerator = numbering(tmp_path, total_limit=2)
    with mock.patch.object(checkpoint_manifest, "describe", wraps=checkpoint_manifest.describe) as describe:
        accelerator.load_state()
    assert describe.call_count == 1, "the one file but the manifest is verified once"
    assert accelerator.project_configuration.iteration == accelerator.save_iteration == 12
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_11", "checkpoint_12"}


@pytest.mark.parametrize("in_a_new_run", [False, True])
def test_after_a_load_of_an_older_checkpoint_the_next_number_is_that_after_the_newest(in_a_new_run, tmp_path):
    accelerator = numbering(tmp_path)
    save_numbers(accelerator, range(11, 13))
    if in_a_new_run:
        accelerator = numbering(tmp_path)
    accelerator.load_state(tmp_path / "checkpoints/checkpoint_11")  # back by one, as after a loss that is no number
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_11", "checkpoint_12", "checkpoint_13"}


def test_a_number_that_is_taken_is_refused_and_stays_as_in_the_original(tmp_path):
    accelerator = numbering(tmp_path)
    accelerator.save_state()
    accelerator.project_configuration.iteration = 0
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()
    assert accelerator.project_configuration.iteration == 0


def test_total_limit_never_removes_what_was_just_written(tmp_path):
    save_numbers(numbering(tmp_path), range(10, 12))
    accelerator = numbering(tmp_path, total_limit=2)
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_0", "checkpoint_11"}
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_0", "checkpoint_1"}
    save_numbers(numbering(tmp_path, total_limit=0), [5])
    assert kept(tmp_path) == {"checkpoint_5"}


def test_a_save_that_fails_does_not_count_but_one_whose_old_checkpoints_could_not_be_removed(tmp_path, monkeypatch):
    accelerator = numbering(tmp_path, total_limit=1)
    accelerator.save_state()
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, draft: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerator.save_state()
    hook.remove()

    def refuse(*_):
        raise PermissionError("a folder that nobody may write to")

    with monkeypatch.context() as patched, pytest.raises(PermissionError):
        patched.setattr(checkpointing, "remove_old_checkpoints", refuse)
        accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_0", "checkpoint_1"}
    accelerator.save_state()
    assert kept(tmp_path) == {"checkpoint_2"}


def test_a_read_only_folder_is_loaded_and_an_interrupted_save_stays_in_it(tmp_path, monkeypatch, caplog):
    accelerator = numbering(tmp_path)
    folder = accelerator.save_state()
    copytree(folder, folder / ".main_part")
    (tmp_path / "checkpoints/.checkpoint_0.removed").mkdir()

    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(os, "replace", refuse)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(PermissionError):
        accelerator.save_state(folder)
    assert (folder / ".main_part/manifest.json").read_text() == (folder / "manifest.json").read_text()
    accelerator.project_configuration.automatic_checkpoint_naming = True
    for function in ("rename", "rmdir", "unlink"):
        monkeypatch.setattr(os, function, refuse)
    accelerator.load_state()
    assert "an interrupted save cannot be finished" in caplog.text


def test_the_newest_complete_checkpoint_is_picked_and_the_others_are_set_aside(tmp_path, caplog):
    accelerator = numbering(tmp_path)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for number in range(4):
        torch.nn.init.constant_(model.bias, number)
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_3/manifest.json").unlink()
    (folder / "checkpoint_2/model.safetensors").write_bytes(b"")
    (folder / "checkpoint_9").mkdir()
    (folder / "checkpoint_text").mkdir()
    accelerator = numbering(tmp_path)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.load_state()
    assert model.bias.item() == 1.0 and accelerator.project_configuration.iteration == 2
    assert "checkpoint_3 holds no manifest" in caplog.text and "checkpoint_2/model.safetensors" in caplog.text
    names = sorted(re.sub(r"\.damaged-.*", " set aside", name) for name in kept(tmp_path))
    set_aside = ["checkpoint_2 set aside", "checkpoint_3 set aside", "checkpoint_9 set aside"]
    assert names == ["checkpoint_0", "checkpoint_1", *set_aside, "checkpoint_text"]


def test_a_new_run_removes_the_remains_of_one_that_was_killed_and_keeps_a_part_that_waits(tmp_path):
    accelerator = numbering(tmp_path)
    save_numbers(accelerator, range(2))
    folder = tmp_path / "checkpoints"
    (folder / ".checkpoint_4.draft_0").mkdir()
    (folder / ".checkpoint_4.part_1_id").mkdir()
    (folder / "checkpoint_1/.draft_1").mkdir()
    (folder / ".checkpoint_0.removed").mkdir()
    manifest = json.loads((folder / "checkpoint_0/manifest.json").read_text()) | {"rank": 1, "files": {}}
    waiting = folder / f".checkpoint_0.part_1_{manifest['save']}"
    waiting.mkdir()
    (waiting / "manifest_1.json").write_text(json.dumps(manifest))
    numbering(tmp_path).load_state()
    assert (folder / "checkpoint_0/manifest_1.json").exists(), "the part of rank 1 was not moved into its checkpoint"
    assert not list(folder.rglob(".*"))
