"""`save_model` and `load_checkpoint_in_model`: the files, and what is in them, are accelerate's."""

import importlib
import json

import pytest
import torch

from common.accelerator import Accelerator, utils
from common.accelerator.utils import load_checkpoint_in_model, load_state_dict

SIZES = ["10 GB", "5TB", "0.04MB", "40kb", 40_000, "1KB", "100KB", 5, 0]


class Network(torch.nn.Module):
    """Weights of many sizes, one of them tied, buffers, and an empty one."""

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


@pytest.fixture(scope="module")
def original():
    """Hugging Face's Accelerate, or a skip."""
    return pytest.importorskip("accelerate")


def content(folder) -> dict:
    """Every file: the weights in it by name, or the JSON."""
    found = {}
    for path in sorted(folder.iterdir()):
        found[path.name] = json.loads(path.read_text()) if path.suffix == ".json" else load_state_dict(path)
    return found


def assert_same_files(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if name.endswith(".json"):
            assert ours[name] == expected
        else:
            assert ours[name].keys() == expected.keys()
            assert all(torch.equal(ours[name][key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "safe",
    [
        pytest.param(True, id="safetensors", marks=pytest.mark.slow),
        pytest.param(False, id="bin", marks=pytest.mark.long),
    ],
)
def test_files_and_shards_are_those_of_accelerate_and_each_loads_the_others(safe, accelerator, original, tmp_path):
    modeling = importlib.import_module("accelerate.utils.modeling")
    theirs = original.Accelerator(cpu=True)
    model = Network()
    several = 0
    for index, size in enumerate(SIZES):
        one, other = tmp_path / f"ours {index}", tmp_path / f"theirs {index}"
        accelerator.save_model(model, one, max_shard_size=size, safe_serialization=safe)
        theirs.save_model(model, other, max_shard_size=size, safe_serialization=safe)
        assert_same_files(content(one), content(other))
        several += len(content(one)) > 2
        for load, folder in ((load_checkpoint_in_model, other), (modeling.load_checkpoint_in_model, one)):
            copy = Network()
            load(copy, str(folder))
            expected = model.state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in copy.state_dict().items())
            assert copy.head.weight is copy.embedding.weight
    assert several >= 5


def test_what_cannot_be_saved_is_refused_before_anything_is_written(accelerator, tmp_path):
    for size in ("10 GiBi", "much", "infGB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            accelerator.save_model(Network(), tmp_path / "m", max_shard_size=size)
    with pytest.raises(RuntimeError, match="meta device"):
        accelerator.save_model(torch.nn.Linear(1, 1, device="meta"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_an_earlier_save_left_is_not_loaded_again(accelerator, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "note.txt").write_text("the user's")
    for size in ("1KB", "10GB", "20KB", "1KB"):
        model = Network()
        accelerator.save_model(model, folder, max_shard_size=size)
        accelerator.save_model(model, tmp_path / size, max_shard_size=size)
        assert content(tmp_path / size).keys() | {"note.txt"} == {path.name for path in folder.iterdir()}
        copy = Network()
        load_checkpoint_in_model(copy, folder)
        assert torch.equal(copy.head.weight, model.head.weight)


def test_a_file_an_index_and_a_wrapped_model_will_do(accelerator, tmp_path, caplog):
    model = Network()
    accelerator.save_model(model, tmp_path, max_shard_size="1KB")
    copy = Network()
    load_checkpoint_in_model(torch.nn.DataParallel(copy), tmp_path / "model.safetensors.index.json", strict=True)
    assert torch.equal(copy.layers[3].weight, model.layers[3].weight)
    torch.save(model.state_dict() | {"more": torch.ones(1)}, tmp_path / "file.bin")
    load_checkpoint_in_model(copy, tmp_path / "file.bin")
    assert "were not used when initializing Network: ['more']" in caplog.text
    with pytest.raises(RuntimeError, match=r"unexpected keys.*more"):
        load_checkpoint_in_model(copy, tmp_path / "file.bin", strict=True)
    torch.save({"norm.weight": torch.ones(40)}, tmp_path / "file.bin")
    load_checkpoint_in_model(copy, tmp_path / "file.bin")
    with pytest.raises(RuntimeError, match="missing keys"):
        load_checkpoint_in_model(copy, tmp_path / "file.bin", strict=True)


def test_what_is_no_checkpoint_of_a_model_is_refused(tmp_path):
    model = torch.nn.Linear(1, 1)
    folder = tmp_path / "a"
    folder.mkdir()
    for checkpoint in (folder, tmp_path / "x"):
        with pytest.raises(ValueError, match=str(checkpoint)):
            load_checkpoint_in_model(model, checkpoint)
    torch.save(model.state_dict(), tmp_path / "outside.bin")
    index = folder / "x.index.json"
    for name in ("../outside.bin", str(tmp_path / "outside.bin"), "", "..", "missing.bin"):
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(ValueError, match="no file beside it"):
            load_checkpoint_in_model(model, folder)
    index.write_text("{")
    with pytest.raises(ValueError):
        load_checkpoint_in_model(model, folder)
    (folder / "y.index.json").touch()
    with pytest.raises(ValueError, match="2 indices"):
        load_checkpoint_in_model(model, folder)


def test_a_file_in_the_place_of_the_folder_is_an_error(accelerator, tmp_path):
    (tmp_path / "m").write_text("the user's")
    with pytest.raises(FileExistsError):
        accelerator.save_model(Network(), tmp_path / "m")
    assert (tmp_path / "m").read_text() == "the user's"


def test_one_object_is_saved_and_loaded_by_the_functions_of_utils(accelerator, original, tmp_path, monkeypatch):
    numpy = pytest.importorskip("numpy")
    theirs = importlib.import_module("accelerate.utils")
    state = {"a": numpy.arange(3, dtype="uint32"), "b": torch.ones(2)}
    for name, write, read in (("ours", utils.save, theirs.load), ("theirs", theirs.save, utils.load)):
        write(state, tmp_path / name)
        found = read(tmp_path / name)
        assert numpy.array_equal(found["a"], state["a"]) and torch.equal(found["b"], state["b"])
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        accelerator.save({"a": torch.zeros(2)}, tmp_path / "ours")
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before and torch.equal(utils.load(tmp_path / "ours")["b"], state["b"])
    with (tmp_path / "open").open("wb") as file:
        utils.save({"b": state["b"]}, file, safe_serialization=True)
    assert torch.equal(load_state_dict((tmp_path / "open").rename(tmp_path / "b.safetensors"))["b"], state["b"])


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("into", ["compiled", "not compiled"])
def test_a_compiled_model_is_saved_and_loaded(safe, into, accelerator, original, tmp_path, caplog):
    modeling = importlib.import_module("accelerate.utils.modeling")
    model = Network()
    prepared = accelerator.prepare(torch.compile(model, backend="eager"))
    accelerator.save_model(prepared, tmp_path, safe_serialization=safe)
    for load in (load_checkpoint_in_model, modeling.load_checkpoint_in_model):
        copy = Network()
        load(torch.compile(copy, backend="eager") if into == "compiled" else copy, str(tmp_path))
        is_loaded = all(torch.equal(tensor, copy.state_dict()[name]) for name, tensor in model.state_dict().items())
        assert is_loaded == (into == "compiled" or load is load_checkpoint_in_model)


def test_a_tied_weight_that_is_left_out_is_named(tmp_path, caplog):
    """Else somebody who looks for its second name in the file would take it for lost."""
    with caplog.at_level("WARNING"):
        utils.save(Network().state_dict(), tmp_path / "weights.safetensors", safe_serialization=True)
    (record,) = caplog.records
    assert "['head.weight']" in record.getMessage()
