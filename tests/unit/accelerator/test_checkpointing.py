"""Stop, resume: the same bits. A checkpoint is whole, or refused by name, or not there."""

import functools
import io
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.accelerator import Accelerator, checkpointing
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.state import PartialState
from common.accelerator.utils import DataLoaderConfiguration, ProjectConfiguration, load_state_dict, set_seed
from common.processes import ranks
from tests.states import forget_states
from tests.toys import Stream


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


class Progress:
    """What a script keeps for itself."""

    epoch, samples, losses = 0, 0, ()

    def state_dict(self):
        return {"epoch": self.epoch, "samples": self.samples, "losses": list(self.losses)}

    def load_state_dict(self, state):
        self.epoch, self.samples, self.losses = state["epoch"], state["samples"], tuple(state["losses"])


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
    stateful=False,
):
    """Train from scratch or a checkpoint; save, and stop if asked, after micro-batch `save_at` (counted from 1).

    With `stateful` loaders in a random order, which continue by themselves; else in a seedable order, and the script
    says where it goes on.
    """
    forget_states()
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=stateful, use_seedable_sampler=not stateful, data_seed=11
        ),
        cpu=True,
    )
    set_seed(1000 * resume + 5, device_specific=True)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 4, generator=generator, dtype=dtype)
    data = (Noisy if dataset is Noisy else TensorDataset)(inputs, inputs.sum(1, keepdim=True))
    model = Net().to(dtype)
    if not dropout:
        model = torch.nn.Linear(4, 1, dtype=dtype)
        torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if total:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
    shuffle = dataset is not Stream
    loader = DataLoader(data if shuffle else Stream(data), batch_size=batch, shuffle=shuffle)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    micro_batch = 0
    if resume:
        accelerator.load_state(folder)
        micro_batch = save_at
    for epoch in range(progress.epoch, epochs):
        progress.epoch = epoch
        loader.set_epoch(epoch)
        rest = loader
        if progress.samples and not stateful:
            rest = accelerator.skip_first_batches(loader, progress.samples // loader.total_batch_size)
        for x, y in rest:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.losses = (*progress.losses, loss.item())
            progress.samples += loader.total_batch_size
            micro_batch += 1
            if micro_batch == save_at and not resume:
                accelerator.save_state(folder)
                if stop:
                    accelerator.end_training()
                    return None
        progress.samples = 0
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    result = weights, progress.losses, optimizer.param_groups[0]["lr"], torch.rand(3)
    accelerator.end_training()
    return result


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert one[1:3] == other[1:3] and torch.equal(one[3], other[3])


@functools.cache
def straight_run(stateful):
    return train(None, stateful=stateful)


# 6 micro-batches an epoch: in the middle of a window, at its end, at the end of the epoch, in the next one.
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("save_at", [1, 3, 6, 8])
def test_stop_and_resume_equals_the_straight_run_bit_for_bit(save_at, stateful, tmp_path):
    train(tmp_path / "c", save_at=save_at, stop=True, stateful=stateful)
    resumed = train(tmp_path / "c", save_at=save_at, resume=True, stateful=stateful)
    assert_same(resumed, straight_run(stateful))


WINDOWS = {"batch": 2, "accumulation": 4, "dataset": TensorDataset, "dropout": False}


@pytest.mark.parametrize(
    ("save_at", "options"),
    [
        pytest.param(2, {"precision": "fp16"}, id="the loss scale within a window"),
        pytest.param(9, {"n": 10, **WINDOWS}, id="a last window of 1 micro-batch in place of 4"),
        pytest.param(5, {"n": 12, **WINDOWS}, id="stopped between the 2 of a last window"),
        pytest.param(3, {"dataset": Stream, "dropout": False}, id="a stream"),
        pytest.param(3, {"dataset": Stream, "dropout": False, "stateful": True}, id="a stateful stream"),
    ],
)
def test_so_does_a_run_with(save_at, options, tmp_path):
    straight = train(None, **options)
    train(tmp_path / "c", save_at=save_at, stop=True, **options)
    assert_same(train(tmp_path / "c", save_at=save_at, resume=True, **options), straight)


def test_two_processes_resume_bit_for_bit_and_other_numbers_within_tolerance(tmp_path):
    straight = ranks(2).run(train, None, stateful=True)
    assert not torch.equal(straight[0][3], straight[1][3])  # each rank has random numbers of its own
    ranks(2).run(train, tmp_path / "c", save_at=1, stop=True, stateful=True)
    first, second = ranks(2).run(train, tmp_path / "c", save_at=1, resume=True, stateful=True)
    assert_same(first, straight[0])
    # Registered objects, here the losses so far, are the main process's.
    assert_same((second[0], straight[1][1], *second[2:]), straight[1])
    # A schedule advances by the number of processes, so it is left out here.
    options = {"n": 24, "dataset": TensorDataset, "dropout": False, "dtype": torch.float64, "total": None}
    options["stateful"] = True
    expected = ranks(2).run(train, None, batch=3, **options)[0][0]
    ranks(2).run(train, tmp_path / "other", batch=3, save_at=2, stop=True, **options)
    resume = {"save_at": 2, "resume": True} | options
    others = [train(tmp_path / "other", batch=6, **resume), *ranks(3).run(train, tmp_path / "other", batch=2, **resume)]
    for weights, *_ in others:
        assert all((weights[name] - expected[name]).abs().max() <= 1e-12 for name in expected)


# What is in the folder


def small(folder=None, stateful=False, **config):
    forget_states()
    accelerator = Accelerator(
        project_config=ProjectConfiguration(project_dir=folder, **config),
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful),
        cpu=True,
    )
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer


@pytest.mark.parametrize("safe", [False, True])
def test_files_and_keys_bear_accelerates_names_and_weights_can_be_read_elsewhere(safe, tmp_path):
    # https://github.com/huggingface/accelerate/issues/438
    accelerator, model, optimizer = small(stateful=True)
    accelerator._models = [torch.nn.DataParallel(model)]
    accelerator.prepare(DataLoader(range(3)), torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    accelerator.register_for_checkpointing(Progress())
    folder = accelerator.save_state(tmp_path / "c", safe_serialization=safe)
    assert folder == tmp_path / "c"
    weights_name = "model.safetensors" if safe else "pytorch_model.bin"
    expected = {weights_name, "optimizer.bin", "scheduler.bin", "dl_state_dict.bin", "custom_checkpoint_0.pkl"}
    assert {path.name for path in folder.iterdir()} == expected | {"random_states_0.pkl", "manifest.json"}
    weights = load_state_dict(folder / weights_name)
    assert weights.keys() == {"weight", "bias"} and torch.equal(weights["weight"], model.weight)
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(folder)
    assert torch.equal(weights["weight"], model.weight)


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
            square = torch.arange(9.0).view(3, 3)
            self.register_buffer("square_transposed", square.T)
            self.register_buffer("square", square)
            self.register_buffer("square_as_integers", square.view(torch.int32))

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path / "m")
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "m/model.safetensors")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert expected.keys() - set(weights) == {"head.weight"}
    accelerator.save_state(tmp_path / "c")
    for tensor in model.state_dict().values():
        tensor.zero_()
    accelerator.load_state(tmp_path / "c")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embedding.weight


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
        checkpointing.write_manifest(tmp_path / "c")
        with pytest.raises(CheckpointError, match="could execute code"):
            accelerator.load_state(tmp_path / "c", load_kwargs={"weights_only": False})
        (tmp_path / "c" / name).write_bytes(kept)
    assert not (tmp_path / "executed").exists()


def test_hooks_may_write_files_and_take_over_models(tmp_path):
    accelerator, model, _ = small()
    calls = []

    def save_hook(models, weights, folder):
        calls.append((list(models), list(weights[0])))
        Path(folder, "sub").mkdir()
        Path(folder, "sub/extra.txt").write_text("mine")
        weights.clear()

    def load_hook(models, folder):
        calls.append(Path(folder, "sub/extra.txt").read_text())
        models.clear()

    handle = accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    for _ in range(2):
        accelerator.save_state(tmp_path / "c")
    assert not (tmp_path / "c/model.safetensors").exists()
    assert "sub/extra.txt" in checkpointing.finish_and_verify(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert calls == [([model], ["weight", "bias"])] * 2 + ["mine"]
    handle.remove()
    accelerator.save_state(tmp_path / "d")
    assert (tmp_path / "d/model.safetensors").exists()


def test_what_does_not_fit_is_refused_before_a_weight_is_changed(tmp_path):
    accelerator, model, _ = small(stateful=True)
    numbers = TensorDataset(torch.arange(12.0))
    loader = accelerator.prepare(DataLoader(numbers, batch_size=2))
    for _ in loader:
        accelerator.save_state(tmp_path / "c")
        break
    saved = model.weight.detach().clone()
    torch.nn.init.constant_(model.weight, 7)

    def check_refused(error, match):
        with pytest.raises(error, match=match):
            accelerator.load_state(tmp_path / "c")
        assert (model.weight == 7).all()

    accelerator.register_for_checkpointing(Progress())
    check_refused(RuntimeError, "does not match the number of registered objects: 0, not 1")
    accelerator._custom_objects.clear()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1))
    check_refused(CheckpointError, r"optimizer_1\.bin")
    accelerator._optimizers.pop()
    accelerator.prepare(torch.nn.Linear(1, 1))
    check_refused(CheckpointError, r"pytorch_model_1\.bin")
    accelerator._models.pop()
    accelerator._dataloaders.clear()
    accelerator.prepare(DataLoader(numbers, batch_size=3))
    check_refused(ValueError, "no whole number of steps of 3")
    accelerator._dataloaders[:] = [loader]
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.weight, saved)
    with pytest.raises(ValueError, match="load_state_dict"):
        accelerator.register_for_checkpointing(object())


# Whole or not there


class Killed(BaseException):
    pass


OPERATIONS = [
    (os, "rename"),
    (os, "replace"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
    (io, "open"),
    (torch, "save"),
]


@pytest.mark.parametrize("naming", ["automatic", pytest.param("one folder", marks=pytest.mark.slow)])
def test_an_interruption_at_any_file_operation_leaves_a_complete_checkpoint(naming, tmp_path, monkeypatch):
    def interruptible(function):
        def run(*args, **kwargs):
            if budget[0] == 0:
                raise Killed
            budget[0] -= 1
            return function(*args, **kwargs)

        return run

    config = {"automatic_checkpoint_naming": True, "total_limit": 1} if naming == "automatic" else {}
    for allowed in range(200):
        folder = tmp_path / str(allowed)
        place = None if config else folder / "c"
        accelerator, model, _ = small(folder, **config)
        torch.nn.init.constant_(model.bias, 1.0)
        accelerator.save_state(place)
        (place or folder).joinpath("note.txt").write_text("the user's")
        torch.nn.init.constant_(model.bias, 2.0)
        budget = [allowed]
        for module, name in OPERATIONS:
            monkeypatch.setattr(module, name, interruptible(getattr(module, name)))
        is_killed = False
        try:
            accelerator.save_state(place)
        except Killed:
            is_killed = True
        finally:
            monkeypatch.undo()
        if place:  # a save over what the interruption left must work as well
            shutil.copytree(place, folder / "other")
            small()[0].save_state(folder / "other")
            checkpointing.finish_and_verify(folder / "other")
            assert (folder / "other/note.txt").read_text() == "the user's"
        accelerator, model, _ = small(folder, **config)
        accelerator.load_state(place)
        assert model.bias.item() in ((1.0, 2.0) if is_killed else (2.0,))
        accelerator.save_state(place)  # and the run goes on
        if not is_killed:
            assert allowed > 10
            return
    pytest.fail("the save never came through")


# What a state may hold


class Thing:
    """Anything with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path):
    saved = {
        "scalars": [numpy.float32(0.1), numpy.int64(2), numpy.bool_(True), numpy.complex64(1), 1 + 2j],
        "arrays": (numpy.arange(6).reshape(2, 3)[:, ::-1], numpy.array(0.5), numpy.zeros(0, "uint16")),
        numpy.int64(7): {"nested": {numpy.float64(1.5)}},
        "tensor": torch.ones(2),
    }
    thing = Thing(saved)
    accelerator, model, optimizer = small()
    optimizer.param_groups[0]["lr"] = numpy.float64(0.1)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, numpy.cos))
    accelerator.register_for_checkpointing(thing)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    rate = scheduler.get_last_lr()
    accelerator.save_state(tmp_path / "c")
    scheduler.step()
    accelerator.load_state(tmp_path / "c")
    assert scheduler.get_last_lr() == rate and thing.state is not saved
    assert thing.state["scalars"] == saved["scalars"] and type(thing.state["scalars"][1]) is numpy.int64
    for ours, theirs in zip(thing.state["arrays"], saved["arrays"], strict=True):
        assert type(ours) is numpy.ndarray and ours.dtype == theirs.dtype and numpy.array_equal(ours, theirs)
    assert thing.state[7] == {"nested": {1.5}} and torch.equal(thing.state["tensor"], torch.ones(2))


@pytest.mark.parametrize("value", [numpy.array(["text"]), numpy.datetime64("2026-01-01"), Progress()])
def test_what_could_not_be_loaded_is_refused_by_name_when_it_is_saved(value, tmp_path):
    accelerator, *_ = small()
    accelerator.save_state(tmp_path / "c")
    accelerator.register_for_checkpointing(Thing(value))
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl is refused.*(numpy|datetime|Progress)"):
        accelerator.save_state(tmp_path / "c")
    assert not list((tmp_path / "c").glob(".*"))
    accelerator._custom_objects.clear()
    accelerator.load_state(tmp_path / "c")


def test_the_home_folder_is_the_same_for_saving_and_loading(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    accelerator, *_ = small()
    accelerator.save_state("~/c")
    assert (tmp_path / "home/c/manifest.json").exists() and not (tmp_path / "~").exists()
    accelerator.load_state("~/c")


# One process fails


class FailsOnRank1:
    """Raises on rank 1 in whatever it is asked to."""

    def __init__(self, what: str) -> None:
        self.what = what

    def done(self, what: str, result: Any = None) -> Any:
        if what == self.what and PartialState().process_index == 1:
            raise OSError(what)
        return result

    def state_dict(self) -> dict:
        return self.done("state_dict", {})

    def load_state_dict(self, state: dict) -> None:
        self.done("load_state_dict")


WHATS = ["save_hook", "state_dict", "get_state_dict", "load_hook", "load_state_dict", "nothing"]


def one_rank_fails(folder: str) -> list[tuple[str | None, list[str]]]:
    """For each of WHATS the error, and what lies about in the folder afterwards."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    failing = FailsOnRank1("nothing")
    accelerator.get_state_dict = lambda model: failing.done("get_state_dict", model.state_dict())
    accelerator.register_for_checkpointing(failing)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: failing.done("save_hook"))
    accelerator.register_load_state_pre_hook(lambda models, folder: failing.done("load_hook"))
    seen = []
    for what in WHATS:
        failing.what = what
        place = os.path.join(folder, what)
        error = None
        try:
            accelerator.save_state(place)
            accelerator.load_state(place)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        accelerator.wait_for_everyone()
        drafts = [name for name in os.listdir(folder) if name.startswith(".")]
        accelerator.wait_for_everyone()
        seen.append((error, drafts))
    accelerator.end_training()
    return seen


def test_what_fails_on_one_process_is_raised_on_all_and_leaves_no_draft(tmp_path):
    first, second = ranks(2).run(one_rank_fails, str(tmp_path))
    assert first == [(f"RemoteError: rank 1: OSError: {what}", []) for what in WHATS[:-1]] + [(None, [])]
    assert second == [(f"OSError: {what}", []) for what in WHATS[:-1]] + [(None, [])]


def saved_from_two_folders(folder: str) -> list[str]:
    """Two machines whose checkpoint folders have different paths; each writes and reads its own."""
    own = os.path.join(folder, f"machine {os.environ['RANK']}")
    os.makedirs(own)
    config = ProjectConfiguration(project_dir=own, automatic_checkpoint_naming=True, save_on_each_node=True)
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        accelerator = Accelerator(project_config=config, cpu=True)
    model = accelerator.unwrap_model(accelerator.prepare(torch.nn.Linear(1, 1)))
    accelerator.save_state()
    with torch.no_grad():
        model.weight.fill_(7.0)
    accelerator.load_state()
    assert model.weight.item() != 7.0
    accelerator.end_training()
    return sorted(os.listdir(os.path.join(own, "checkpoints/checkpoint_0")))


def test_machines_that_save_for_themselves_may_have_different_folders(tmp_path):
    first, second = ranks(2).run(saved_from_two_folders, str(tmp_path))
    assert first == second == ["manifest.json", "model.safetensors", "random_states_0.pkl", "random_states_1.pkl"]


# Compiled models


def weighing(number, compiled):
    """An Accelerator and a model whose weights are all `number`; the script compiles it itself if it is `compiled`."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, number)
    if compiled:
        model = torch.compile(model, backend="eager")
    return accelerator, accelerator.prepare(model)


@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False), (True, True)])
def test_a_run_that_compiles_its_model_loads_what_another_saved_and_the_reverse(saved, loaded, tmp_path):
    accelerator, model = weighing(3.0, compiled=saved)
    accelerator.step = 1
    accelerator.gradient_accumulation_steps = 2  # in the middle of a window, with gradients
    model(torch.ones(1, 2)).sum().backward()
    accelerator.save_state(tmp_path / "c")
    accelerator, model = weighing(5.0, compiled=loaded)
    accelerator.load_state(tmp_path / "c")
    assert model.weight.tolist() == [[3.0, 3.0]]
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def models_in_a_checkpoint_after_preparing_twice():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(accelerator.prepare(torch.nn.Linear(2, 1)))
    number = len(accelerator._models)
    forget_states()
    return number


def test_a_model_that_two_processes_prepare_again_is_saved_once():
    assert ranks(2).run(models_in_a_checkpoint_after_preparing_twice) == [1, 1]


# What a state dict may hold beside tensors with memory of their own


class Counting(torch.nn.Linear):
    """Has an extra state that is no tensor."""

    number = 3

    def get_extra_state(self) -> dict:
        return {"number": self.number}

    def set_extra_state(self, state: dict) -> None:
        self.number = state["number"]


def test_an_extra_state_of_a_module_comes_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Counting(2, 1))
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    model.number = 5
    accelerator.load_state(tmp_path / "c")
    assert model.number == 3


def test_gradients_that_were_there_before_loading_are_those_of_the_checkpoint_afterwards(tmp_path):
    accelerator, model = weighing(3.0, compiled=False)
    accelerator.save_state(tmp_path / "c")  # at the end of a window, without gradients
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    accelerator.load_state(tmp_path / "c")
    assert model.weight.grad is None
