"""The content of a checkpoint: the names of its files and keys, states of every kind, and nothing that is code."""

import json
import os
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from common.accelerator.checkpointing import CheckpointError
from common.accelerator.utils import DataLoaderConfiguration, load_state_dict
from common.accelerator.utils.checkpoint_manifest import describe
from tests.toys import Numbers
from tests.unit.accelerator.several_processes import on_ranks


class Thing:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def started():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer


@pytest.mark.parametrize("safe", [False, True])
def test_files_and_keys_bear_accelerates_names_and_weights_can_be_read_elsewhere(safe, tmp_path):
    # https://github.com/huggingface/accelerate/issues/438
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True), cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(torch.nn.DataParallel(model), optimizer, schedule, DataLoader(range(3)))
    accelerator.register_for_checkpointing(Thing({}))
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


def test_hooks_may_write_files_and_take_over_models(tmp_path):
    accelerator, model, _ = started()
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
    accelerator.load_state(tmp_path / "c")
    assert calls == [([model], ["weight", "bias"])] * 2 + ["mine"]
    (tmp_path / "c/sub/extra.txt").write_text("changed")
    with pytest.raises(CheckpointError, match=r"extra\.txt is not what was saved"):
        accelerator.load_state(tmp_path / "c")
    handle.remove()
    accelerator.save_state(tmp_path / "d")
    assert (tmp_path / "d/model.safetensors").exists()


def test_the_home_folder_is_the_same_for_saving_and_loading(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    accelerator, *_ = started()
    accelerator.save_state("~/c")
    assert (tmp_path / "home/c/manifest.json").exists() and not (tmp_path / "~").exists()
    accelerator.load_state("~/c")


def test_tied_and_overlapping_weights_survive(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(3, 2)
            self.head = torch.nn.Linear(2, 3, bias=False)
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
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_state(tmp_path / "c")
    weights = load_state_dict(tmp_path / "c/model.safetensors")
    assert expected.keys() - weights.keys() == {"head.weight"}
    for tensor in model.state_dict().values():
        tensor.zero_()
    accelerator.load_state(tmp_path / "c")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embedding.weight


class Counting(torch.nn.Linear):
    number = 3

    def get_extra_state(self) -> dict:
        return {"number": self.number}

    def set_extra_state(self, state: dict) -> None:
        self.number = state["number"]


def test_an_extra_state_of_a_module_comes_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Counting(2, 1))
    with pytest.raises(ValueError, match="_extra_state is no tensor"):
        accelerator.save_state(tmp_path / "c")
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    model.number = 5
    accelerator.load_state(tmp_path / "c")
    assert model.number == 3


def weighing(number, is_compiled=False):
    """An Accelerator within a window, and a model whose weights are all `number`, compiled by the script or not.

    Each gradient is 1: half of that of the loss, which is 2, because the window has two micro-batches.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, number)
    if is_compiled:
        model = torch.compile(model, backend="eager")
    model = accelerator.prepare(model)
    with accelerator.accumulate(model):
        accelerator.backward(2 * model(torch.ones(1, 2)).sum())
    return accelerator, model


@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False), (True, True)])
def test_a_run_that_compiles_its_model_loads_what_another_saved_and_the_reverse(saved, loaded, tmp_path):
    accelerator, _ = weighing(3.0, is_compiled=saved)
    accelerator.save_state(tmp_path / "c")
    accelerator, model = weighing(5.0, is_compiled=loaded)
    model.zero_grad()
    accelerator.load_state(tmp_path / "c")
    assert model.weight.tolist() == [[3.0, 3.0]] and model.weight.grad.tolist() == [[1.0, 1.0]]


def test_gradients_that_were_there_before_loading_are_those_of_the_checkpoint_afterwards(tmp_path):
    accelerator, model = weighing(3.0)
    accelerator.save_state(tmp_path / "within")
    with accelerator.accumulate(model):
        model.zero_grad()
    accelerator.save_state(tmp_path / "at the end")
    model(torch.ones(1, 2)).sum().backward()
    accelerator.load_state(tmp_path / "within")
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    accelerator.load_state(tmp_path / "at the end")
    assert model.weight.grad is None


def prepare_twice_and_save(accelerator, folder):
    accelerator.prepare(accelerator.prepare(torch.nn.Linear(2, 1)))
    accelerator.save_state(folder)


def test_a_model_that_two_processes_prepare_again_is_saved_once(tmp_path):
    on_ranks(2, prepare_twice_and_save, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("setting", "file"), [("use_seedable_sampler", "sampler.bin"), ("use_stateful_dataloader", "dl_state_dict.bin")]
)
def test_load_state_names_what_nothing_is_prepared_for(setting, file, tmp_path, caplog):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**{setting: True}), cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Numbers(3), shuffle=True))
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert not caplog.records
    accelerator.free_memory()
    for with_loaders, missed in ((False, []), (True, [file])):
        accelerator.load_state(tmp_path / "c", with_loaders=with_loaders)
        names = ", ".join(sorted(["model.safetensors", "optimizer.bin", *missed]))
        assert f"c holds {names}, and nothing is prepared that takes it" in caplog.records[-1].getMessage()


def test_loading_asks_for_memory_of_the_cpu(tmp_path):
    """A tensor of rank 0's GPU would else come back there, on every rank."""
    accelerator, _, _ = started()
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    with mock.patch.object(torch, "load", wraps=torch.load) as load:
        accelerator.load_state(tmp_path / "c")
    assert [str(call.kwargs["map_location"]) for call in load.call_args_list] == ["cpu"] * load.call_count
    assert load.call_count >= 2


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path):
    saved = {
        "scalars": [numpy.float32(0.1), numpy.int64(2), numpy.bool_(True), numpy.complex64(1), 1 + 2j],
        "arrays": (numpy.arange(6).reshape(2, 3)[:, ::-1], numpy.array(0.5), numpy.zeros(0, "uint16")),
        numpy.int64(7): {"nested": {numpy.float64(1.5)}},
        "tensor": torch.ones(2),
    }
    thing = Thing(saved)
    accelerator, model, optimizer = started()
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


def saved_and_loaded_thing(accelerator, folder):
    thing = Thing(f"of rank {accelerator.process_index}")
    accelerator.register_for_checkpointing(thing)
    accelerator.load_state(accelerator.save_state(folder))
    return thing.state


def test_all_ranks_get_the_registered_object_of_the_main_process(tmp_path):
    assert on_ranks(2, saved_and_loaded_thing, tmp_path / "c") == ["of rank 0", "of rank 0"]


@pytest.mark.parametrize("value", [numpy.array(["text"]), numpy.datetime64("2026-01-01"), Thing({})])
def test_save_state_refuses_by_name_what_could_not_be_loaded(value, tmp_path):
    accelerator, *_ = started()
    thing = Thing(1)
    accelerator.register_for_checkpointing(thing)
    accelerator.save_state(tmp_path / "c")
    thing.state = value
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl is refused.*(numpy|datetime|Thing)"):
        accelerator.save_state(tmp_path / "c")
    assert not list(tmp_path.rglob(".*"))
    accelerator.load_state(tmp_path / "c")
    assert thing.state == 1


def forge(folder, name, content) -> None:
    torch.save(content, folder / name)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = describe(folder / name)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", [None, {}, {"step": 0}], ids=str)
def test_a_file_that_no_rank_has_saved_is_refused_by_name(content, tmp_path):
    accelerator, *_ = started()
    folder = accelerator.save_state(tmp_path)
    forge(folder, "random_states_0.pkl", content)
    with pytest.raises(CheckpointError, match=r"random_states_0\.pkl is not what a rank saves"):
        accelerator.load_state(folder)


def test_nothing_in_a_checkpoint_can_execute_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    accelerator, *_ = started()
    for name in ("optimizer.bin", "random_states_0.pkl"):
        folder = accelerator.save_state(tmp_path / name)
        forge(folder, name, {"step": Evil()})
        with pytest.raises(CheckpointError, match="could execute code"):
            accelerator.load_state(folder, load_kwargs={"weights_only": False})
    assert not (tmp_path / "executed").exists()


def register_a_thing(accelerator, model):
    accelerator.register_for_checkpointing(Thing({}))


def prepare_an_optimizer(accelerator, model):
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1))


def prepare_a_model(accelerator, model):
    accelerator.prepare(torch.nn.Linear(1, 1))


def prepare_larger_batches(accelerator, model):
    accelerator.free_memory()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1), DataLoader(Numbers(12), batch_size=3))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (register_a_thing, RuntimeError, "does not match the number of registered objects: 0, not 1"),
        (prepare_an_optimizer, CheckpointError, r"optimizer_1\.bin"),
        (prepare_a_model, CheckpointError, r"model_1\.safetensors"),
        (prepare_larger_batches, ValueError, "2 samples per step cannot go on with 3"),
    ],
)
def test_load_state_refuses_what_does_not_fit_before_a_weight_is_changed(change, error, match, tmp_path):
    accelerator, model, _ = started()
    for _ in accelerator.prepare(DataLoader(Numbers(12), batch_size=2)):
        accelerator.save_state(tmp_path / "c")
        break
    torch.nn.init.constant_(model.weight, 7)
    accelerator.load_state(tmp_path / "c")
    assert (model.weight != 7).all()
    torch.nn.init.constant_(model.weight, 7)
    change(accelerator, model)
    with pytest.raises(error, match=match):
        accelerator.load_state(tmp_path / "c")
    assert (model.weight == 7).all()
