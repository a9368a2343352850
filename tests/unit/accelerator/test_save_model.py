"""`save_model` and `load_checkpoint_in_model`: the files, and what is in them, are accelerate's."""

import numpy
import pytest
import torch

from common.accelerator import Accelerator, utils
from common.accelerator.utils import load_checkpoint_in_model, load_state_dict
from tests.peers import import_or_skip


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 40)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(5))
        self.norm = torch.nn.BatchNorm1d(40)
        self.head = torch.nn.Linear(40, 50)
        self.head.weight = self.embedding.weight
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("turned", torch.randn(3, 4).T)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize("safe", [True, False])
def test_the_file_is_that_of_accelerate_and_each_loads_the_others(safe, accelerator, tmp_path, caplog):
    original = import_or_skip("accelerate")
    modeling = import_or_skip("accelerate.utils.modeling")
    model = Network()
    accelerator.save_model(model, tmp_path / "ours", max_shard_size="1KB", safe_serialization=safe)
    assert "max_shard_size='1KB' has no effect" in caplog.text
    original.Accelerator(cpu=True).save_model(model, tmp_path / "theirs", safe_serialization=safe)
    (one,), (other,) = (list((tmp_path / name).iterdir()) for name in ("ours", "theirs"))
    assert one.name == other.name
    ours, theirs = load_state_dict(one), load_state_dict(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    expected = model.state_dict()
    for load, folder in ((load_checkpoint_in_model, tmp_path / "theirs"), (modeling.load_checkpoint_in_model, one)):
        copy = Network()
        load(copy, str(folder))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in copy.state_dict().items())
        assert copy.head.weight is copy.embedding.weight


def test_weights_on_the_meta_device_are_refused(accelerator, tmp_path):
    with pytest.raises(RuntimeError, match="meta device"):
        accelerator.save_model(torch.nn.Linear(1, 1, device="meta"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("others", "what"), [({"more": torch.ones(1)}, "more"), ({}, "bias")], ids=["one too many", "one too few"]
)
def test_weights_of_other_names_are_an_error_where_they_must_fit(others, what, tmp_path, caplog):
    model = torch.nn.Linear(1, 1)
    weights = model.state_dict() | others if others else {"weight": model.weight}
    torch.save(weights, tmp_path / "file.bin")
    load_checkpoint_in_model(torch.nn.DataParallel(model), tmp_path / "file.bin")
    assert ("were not used when initializing Linear: ['more']" in caplog.text) == bool(others)
    with pytest.raises(RuntimeError, match=what):
        load_checkpoint_in_model(model, tmp_path / "file.bin", strict=True)


def test_weights_are_loaded_from_no_other_file(tmp_path):
    (tmp_path / "x.index.json").write_text("{}")
    for checkpoint in (tmp_path, tmp_path / "nowhere", tmp_path / "x.index.json"):
        with pytest.raises(ValueError, match=str(checkpoint)):
            load_checkpoint_in_model(torch.nn.Linear(1, 1), checkpoint)


def test_a_file_in_the_place_of_the_folder_is_an_error(accelerator, tmp_path):
    (tmp_path / "m").write_text("the user's")
    with pytest.raises(FileExistsError):
        accelerator.save_model(Network(), tmp_path / "m")
    assert (tmp_path / "m").read_text() == "the user's"


def test_save_and_load_read_the_files_of_accelerate_and_the_reverse(tmp_path):
    theirs = import_or_skip("accelerate.utils")
    state = {"a": numpy.arange(3, dtype="uint32"), "b": torch.ones(2)}
    for save, load in ((utils.save, theirs.load), (theirs.save, utils.load)):
        save(state, tmp_path / "file")
        found = load(tmp_path / "file")
        assert numpy.array_equal(found["a"], state["a"]) and torch.equal(found["b"], state["b"])


def test_a_save_that_fails_leaves_the_file_of_before_and_no_other(accelerator, tmp_path):
    accelerator.save({"a": torch.ones(2)}, tmp_path / "file")
    with pytest.raises(TypeError, match="cannot pickle"):
        accelerator.save({"a": torch.zeros(2), "b": (each for each in "a generator")}, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert torch.equal(utils.load(tmp_path / "file")["a"], torch.ones(2))


def test_an_open_file_can_be_saved_to(tmp_path):
    with (tmp_path / "b").open("wb") as file:
        utils.save({"b": torch.ones(2)}, file)
    assert torch.equal(utils.load(tmp_path / "b")["b"], torch.ones(2))


@pytest.mark.parametrize("into", ["compiled", "not compiled"])
def test_a_compiled_model_is_saved_and_loaded(into, accelerator, tmp_path):
    modeling = import_or_skip("accelerate.utils.modeling")
    model = Network()
    prepared = accelerator.prepare(torch.compile(model, backend="eager"))
    accelerator.save_model(prepared, tmp_path)
    for load in (load_checkpoint_in_model, modeling.load_checkpoint_in_model):
        copy = Network()
        load(torch.compile(copy, backend="eager") if into == "compiled" else copy, str(tmp_path))
        is_loaded = all(torch.equal(tensor, copy.state_dict()[name]) for name, tensor in model.state_dict().items())
        assert is_loaded == (into == "compiled" or load is load_checkpoint_in_model)


def test_a_tied_weight_that_is_left_out_is_named(tmp_path, caplog):
    """Somebody who looks for its second name in the file would take it for lost."""
    with caplog.at_level("WARNING"):
        utils.save(Network().state_dict(), tmp_path / "weights.safetensors", safe_serialization=True)
    (record,) = caplog.records
    assert "['head.weight']" in record.getMessage()
