"""Stop, resume: the same bits. A checkpoint is whole, or refused by name, or not there."""

import json
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from common.accelerator import Accelerator, checkpointing
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.state import GradientState, PartialState
from common.accelerator.utils import ProjectConfiguration, set_seed
from tests.workers import ranks


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.dropout, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


class Noisy(TensorDataset):
    """Draws from all three generators for each sample."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + random.random() + torch.rand(()) + numpy.random.rand(), y


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[i] for i in range(len(self.dataset)))


class Progress:
    """What a script keeps for itself."""

    epoch, losses = 0, ()

    def state_dict(self):
        return {"epoch": self.epoch, "losses": list(self.losses)}

    def load_state_dict(self, state):
        self.epoch, self.losses = state["epoch"], tuple(state["losses"])


def train(
    folder,
    n=22,
    batch=4,
    accumulation=3,
    epochs=2,
    save_at=None,
    stop=False,
    resume=False,
    precision="no",
    dataset=Noisy,
    dropout=True,
    dtype=torch.float32,
    total=100,
):
    """Train from scratch or a checkpoint; save, and stop if asked, after micro-batch `save_at` (counted from 1)."""
    PartialState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation, cpu=True)
    set_seed(1000 * resume + 5, device_specific=True)
    generator = torch.Generator().manual_seed(0)
    data = Noisy(
        torch.randn(n, 4, generator=generator, dtype=dtype), torch.randn(n, 1, generator=generator, dtype=dtype)
    )
    if dataset is TensorDataset:
        data = TensorDataset(*data.tensors)
    model = Net().to(dtype) if dropout else torch.nn.Linear(4, 1, dtype=dtype)
    if not dropout:
        torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if total:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
    shuffle = dataset is not Stream
    loader = DataLoader(data if shuffle else Stream(data), batch_size=batch, shuffle=shuffle)
    accelerator.dataloader_config.data_seed = 11
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    micro_batch = 0
    if resume:
        accelerator.load_state(folder)
        micro_batch = save_at
    for epoch in range(progress.epoch, epochs):
        progress.epoch = epoch
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.losses = (*progress.losses, loss.item())
            micro_batch += 1
            if micro_batch == save_at and not resume:
                accelerator.save_state(folder)
                if stop:
                    accelerator.end_training()
                    return None
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    result = weights, progress.losses, optimizer.param_groups[0]["lr"], torch.rand(3)
    accelerator.end_training()
    return result


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert one[1:3] == other[1:3] and torch.equal(one[3], other[3])


# 6 micro-batches an epoch: in the middle of a window, at its end, at the end of the epoch, in the next one.
@pytest.mark.parametrize("save_at", [1, 3, 5, 6, 8, 9])
def test_stop_and_resume_equals_the_straight_run_bit_for_bit(save_at, tmp_path):
    straight = train(None)
    assert_same(train(tmp_path / "watched", save_at=save_at), straight)  # saving disturbs nothing
    train(tmp_path / "c", save_at=save_at, stop=True)
    assert_same(train(tmp_path / "c", save_at=save_at, resume=True), straight)


@pytest.mark.parametrize("save_at", [2, 6])
def test_the_loss_scale_is_part_of_the_state(save_at, tmp_path):
    straight = train(None, precision="fp16")
    train(tmp_path / "c", save_at=save_at, stop=True, precision="fp16")
    assert_same(train(tmp_path / "c", save_at=save_at, resume=True, precision="fp16"), straight)


def test_a_window_cut_short_after_the_resumption_is_averaged_over_its_actual_size(tmp_path):
    options = {"n": 10, "batch": 2, "accumulation": 4, "dataset": TensorDataset, "dropout": False}
    straight = train(None, **options)  # 5 micro-batches: windows of 4 and of 1
    train(tmp_path / "c", save_at=9, stop=True, **options)
    assert_same(train(tmp_path / "c", save_at=9, resume=True, **options), straight)
    options["n"] = 12  # windows of 4 and of 2: stop between these two
    straight = train(None, **options)
    train(tmp_path / "c", save_at=5, stop=True, **options)
    assert_same(train(tmp_path / "c", save_at=5, resume=True, **options), straight)


def test_a_stream_continues_with_the_next_batch(tmp_path):
    options = {"dataset": Stream, "dropout": False}
    train(tmp_path / "c", save_at=3, stop=True, **options)
    resumed = train(tmp_path / "c", save_at=3, resume=True, **options)
    assert len(resumed[1]) == len(train(None, **options)[1])


def test_two_processes_resume_bit_for_bit_and_other_numbers_within_tolerance(tmp_path):
    straight = ranks(2).run(train, None)
    assert not torch.equal(straight[0][3], straight[1][3])  # each rank has random numbers of its own
    ranks(2).run(train, tmp_path / "c", save_at=1, stop=True)
    first, second = ranks(2).run(train, tmp_path / "c", save_at=1, resume=True)
    assert_same(first, straight[0])
    # Registered objects, here the losses so far, are the main process's.
    assert_same((second[0], straight[1][1], *second[2:]), straight[1])
    # A schedule advances by the number of processes, so it is left out here.
    options = {"n": 24, "dataset": TensorDataset, "dropout": False, "dtype": torch.float64, "total": None}
    expected = ranks(2).run(train, None, batch=3, **options)[0][0]
    ranks(2).run(train, tmp_path / "other", batch=3, save_at=2, stop=True, **options)
    resume = {"save_at": 2, "resume": True} | options
    others = [train(tmp_path / "other", batch=6, **resume), *ranks(3).run(train, tmp_path / "other", batch=2, **resume)]
    for weights, *_ in others:
        assert all((weights[name] - expected[name]).abs().max() <= 1e-12 for name in expected)


# What is in the folder


def small(folder=None, **config):
    PartialState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=folder, **config), cpu=True)
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer


def test_files_bear_accelerates_names_and_its_weights_can_be_read_elsewhere(tmp_path):
    accelerator, model, optimizer = small()
    accelerator.prepare(DataLoader(range(3)), torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    accelerator.register_for_checkpointing(Progress())
    assert accelerator.save_state(tmp_path / "c") == str(tmp_path / "c")
    expected = {"model.safetensors", "optimizer.bin", "scheduler.bin", "dl_state_dict.bin", "random_states_0.pkl"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == expected | {"custom_checkpoint_0.pkl", "manifest.json"}
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "c/model.safetensors")["weight"], model.weight)
    accelerator.save_state(tmp_path / "d", safe_serialization=False)
    assert torch.equal(torch.load(tmp_path / "d/pytorch_model.bin", weights_only=True)["weight"], model.weight)
    for folder in ("c", "d"):
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state(tmp_path / folder)
        assert model.weight.abs().sum() > 0


def test_keys_are_the_scripts_own_and_those_with_a_prefix_load_too(tmp_path):
    # https://github.com/huggingface/accelerate/issues/438
    accelerator, model, _ = small()
    wrapped = torch.nn.DataParallel(model)
    accelerator._models = [wrapped]
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    path = tmp_path / "c/pytorch_model.bin"
    weights = torch.load(path, weights_only=True)
    assert list(weights) == ["weight", "bias"]
    torch.save({f"module.{name}": value + 1 for name, value in weights.items()}, path)
    (tmp_path / "c/manifest.json").unlink()
    checkpointing._seal(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.weight, weights["weight"] + 1)


def test_tied_and_overlapping_weights_survive(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
            self.head.weight = self.embedding.weight
            block = torch.arange(6.0)
            self.register_buffer("left", block[:3])
            self.register_buffer("right", block[3:])
            self.register_buffer("turned", torch.arange(6.0).view(2, 3).T)

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path / "m")
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "m/model.safetensors")
    assert set(weights) == {"embedding.weight", "left", "right", "turned"}
    assert torch.equal(weights["turned"], model.turned)
    accelerator.save_state(tmp_path / "c")
    expected = model.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight.zero_()
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.head.weight, expected) and model.head.weight is model.embedding.weight


def test_nothing_in_a_checkpoint_can_execute_code(tmp_path):
    accelerator, *_ = small()
    accelerator.save_state(tmp_path / "c")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for name in ("optimizer.bin", "random_states_0.pkl"):
        kept = (tmp_path / "c" / name).read_bytes()
        torch.save({"step": Evil()}, tmp_path / "c" / name)
        (tmp_path / "c/manifest.json").unlink()
        checkpointing._seal(tmp_path / "c")
        with pytest.raises(pickle.UnpicklingError):
            accelerator.load_state(tmp_path / "c", load_kwargs={"weights_only": False})
        (tmp_path / "c" / name).write_bytes(kept)
    assert not (tmp_path / "executed").exists()

    class Opaque(Progress):
        def state_dict(self):
            return {"object": Progress()}

    accelerator.register_for_checkpointing(Opaque())
    with pytest.raises(pickle.UnpicklingError):  # found when it is saved, not when it is needed
        accelerator.save_state(tmp_path / "e")


def test_hooks_may_write_files_and_take_over_models(tmp_path):
    accelerator, model, _ = small()
    calls = []

    def save_hook(models, weights, folder):
        calls.append((list(models), list(weights[0])))
        with open(os.path.join(folder, "extra.txt"), "w") as file:
            file.write("mine")
        weights.clear()

    def load_hook(models, folder):
        with open(os.path.join(folder, "extra.txt")) as file:
            calls.append(file.read())
        models.clear()

    handle = accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    accelerator.save_state(tmp_path / "c")
    assert not (tmp_path / "c/model.safetensors").exists()
    assert "extra.txt" in json.loads((tmp_path / "c/manifest.json").read_text())
    accelerator.load_state(tmp_path / "c")
    assert calls == [([model], ["weight", "bias"]), "mine"]
    handle.remove()
    accelerator.save_state(tmp_path / "d")
    assert (tmp_path / "d/model.safetensors").exists()


def test_what_was_prepared_or_registered_must_match(tmp_path):
    accelerator, model, _ = small()
    accelerator.save_state(tmp_path / "c")
    accelerator.register_for_checkpointing(Progress())
    with pytest.raises(RuntimeError, match="holds 0 registered objects, but 1"):
        accelerator.load_state(tmp_path / "c")
    accelerator._custom_objects.clear()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(CheckpointError, match=r"optimizer_1\.bin"):
        accelerator.load_state(tmp_path / "c")
    with pytest.raises(ValueError, match="load_state_dict"):
        accelerator.register_for_checkpointing(object())


# Whole or not there


def test_a_damaged_file_is_refused_by_name(tmp_path):
    accelerator, *_ = small()
    accelerator.save_state(tmp_path / "c")
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl", "manifest.json"):
        content = (tmp_path / "c" / name).read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 255
        for damage in (bytes(flipped), content[:-1], content + b"x", b""):
            (tmp_path / "c" / name).write_bytes(damage)
            with pytest.raises(CheckpointError, match="manifest.json" if name == "manifest.json" else name):
                accelerator.load_state(tmp_path / "c")
        (tmp_path / "c" / name).unlink()
        with pytest.raises(CheckpointError, match=name):
            accelerator.load_state(tmp_path / "c")
        (tmp_path / "c" / name).write_bytes(content)
    accelerator.load_state(tmp_path / "c")
    with pytest.raises(ValueError, match="nowhere holds no manifest"):
        accelerator.load_state(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="No input_dir"):
        accelerator.load_state()


def numbered(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_automatic_naming_keeps_the_newest_and_continues_after_a_load(tmp_path):
    # https://github.com/huggingface/accelerate/issues/1163
    accelerator, *_ = small(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        accelerator.load_state()
    for _ in range(12):
        accelerator.save_state()
    assert numbered(tmp_path) == ["checkpoint_10", "checkpoint_11"]
    accelerator, *_ = small(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator.load_state()
    assert accelerator.save_iteration == 12
    accelerator.save_state()
    assert numbered(tmp_path) == ["checkpoint_11", "checkpoint_12"]
    accelerator.project_configuration.iteration = 12
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()


def test_the_newest_complete_checkpoint_is_picked_and_the_others_named(tmp_path, caplog):
    accelerator, model, _ = small(tmp_path, automatic_checkpoint_naming=True)
    for value in (1.0, 2.0, 3.0, 4.0):
        with torch.no_grad():
            model.bias.fill_(value)
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_3/manifest.json").unlink()
    (folder / "checkpoint_2/model.safetensors").write_bytes(b"")
    (folder / "checkpoint_9").mkdir()
    (folder / "checkpoint_text").mkdir()
    with caplog.at_level("INFO"):
        accelerator.load_state()
    assert model.bias.item() == 2.0 and accelerator.save_iteration == 2
    said = caplog.text
    assert "checkpoint_3" in said and "checkpoint_2/model.safetensors" in said and "resuming from" in said


class Killed(BaseException):
    pass


@pytest.mark.parametrize("naming", ["automatic", "one folder"])
def test_an_interruption_at_any_file_operation_leaves_a_complete_checkpoint(naming, tmp_path, monkeypatch):
    automatic = naming == "automatic"
    operations = {
        checkpointing.os: ("rename", "replace", "open", "fsync", "close"),
        checkpointing.shutil: ("rmtree",),
        checkpointing.torch: ("save",),
        checkpointing.Path: ("write_text", "mkdir", "unlink", "rename"),
    }
    originals = {(module, name): getattr(module, name) for module, names in operations.items() for name in names}
    budget = [0]

    def interruptible(function):
        def run(*args, **kwargs):
            if budget[0] == 0:
                raise Killed
            budget[0] -= 1
            return function(*args, **kwargs)

        return run

    finished = False
    for allowed in range(200):
        folder = tmp_path / str(allowed)
        config = {"automatic_checkpoint_naming": True, "total_limit": 1} if automatic else {}
        place = None if automatic else folder / "c"
        accelerator, model, _ = small(folder, **config)
        with torch.no_grad():
            model.bias.fill_(1.0)
        accelerator.save_state(place)
        (folder / "note.txt").write_text("the user's")
        if place:
            (place / "note.txt").write_text("the user's")
        with torch.no_grad():
            model.bias.fill_(2.0)
        budget[0] = allowed
        for (module, name), function in originals.items():
            monkeypatch.setattr(module, name, interruptible(function))
        try:
            accelerator.save_state(place)
            finished = True
        except Killed:
            pass
        finally:
            monkeypatch.undo()
        if place:  # a save over what the interruption left must work as well
            shutil.copytree(place, folder / "other")
            small()[0].save_state(folder / "other")
            checkpointing.verify(folder / "other")
            assert (folder / "other/note.txt").read_text() == "the user's"
        accelerator, model, _ = small(folder, **config)
        accelerator.load_state(place)
        assert model.bias.item() in ((2.0,) if finished else (1.0, 2.0))
        accelerator.save_state(place)  # and the run goes on
        shutil.rmtree(folder)
        if finished:
            assert allowed > 20
            return
    pytest.fail("the save never came through")


def test_a_write_that_fails_is_one_error_and_the_old_checkpoint_survives(tmp_path, monkeypatch):
    accelerator, *_ = small()
    accelerator.save_state(tmp_path / "c")
    save = torch.save

    def full(*args, **kwargs):
        save(*args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        accelerator.save_state(tmp_path / "c")
    monkeypatch.undo()
    assert not list((tmp_path / "c").glob(".*"))
    accelerator.load_state(tmp_path / "c")


def failing_save(folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    error = None
    try:
        accelerator.save_state(os.path.join(folder, "file", "c"))
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    accelerator.end_training()
    return error


def test_an_error_on_the_writing_process_reaches_all_of_them(tmp_path):
    (tmp_path / "file").write_text("in the way")
    first, second = ranks(2).run(failing_save, str(tmp_path))
    assert first.startswith("NotADirectoryError") and second.startswith("RuntimeError: rank 0: NotADirectoryError")


def test_save_writes_whole_files_or_none(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.bin")
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    with (tmp_path / "open.bin").open("wb") as file:
        accelerator.save([1], file)
    assert torch.load(tmp_path / "open.bin", weights_only=True) == [1]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        accelerator.save({"a": torch.zeros(2)}, tmp_path / "a.bin")
    monkeypatch.undo()
    assert torch.equal(torch.load(tmp_path / "a.bin", weights_only=True)["a"], torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.safetensors", "open.bin"]


def test_a_model_that_would_need_shards_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1000, 10)
    for limit in (1000, "39KB", "39KiB"):
        with pytest.raises(NotImplementedError, match="40040 bytes"):
            accelerator.save_model(model, tmp_path, max_shard_size=limit)
    accelerator.save_model(model, tmp_path, max_shard_size="1MB", safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").exists()
    with pytest.raises(RuntimeError, match="meta"):
        accelerator.save_model(torch.nn.Linear(1, 1, device="meta"), tmp_path)


def _lives_until_killed() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_what_a_killed_save_left_is_swept_and_what_a_living_one_builds_is_not(tmp_path):
    other_job = _lives_until_killed()
    drafts = {name: tmp_path / "c" / f".{name}@{other_job.pid}@{socket.gethostname()}.tmp" for name in ("a", "b")}
    drafts["elsewhere"] = tmp_path / "c" / f".e@{other_job.pid}@another-machine.tmp"
    try:
        for draft in drafts.values():
            draft.mkdir(parents=True)
            (draft / "half").touch()
        Accelerator(cpu=True).save_state(tmp_path / "c")
        assert all((draft / "half").exists() for draft in drafts.values())
    finally:
        other_job.kill()
        other_job.wait()
    Accelerator(cpu=True).save_state(tmp_path / "c")
    assert [draft for draft in drafts.values() if draft.exists()] == [drafts["elsewhere"]]
    assert list((tmp_path / "c").glob(".*")) == [drafts["elsewhere"]]
