"""MNIST as tensors: the same numbers as torchvision's, faster, verified, fetched once."""

import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torchvision import transforms
from torchvision.datasets import MNIST

from common.data import load_data
from common.data.mnist import MNIST_FILES
from common.errors import UserError
from common.process_group import process_group
from common.processes import ranks
from tests.bits import flip_a_bit

# A mirror that refuses the connection: no network, without taking the machine's away.
NO_MIRROR = ["http://127.0.0.1:9/"]


def flags(**changes) -> Namespace:
    defaults = {"dataset": "synthetic", "data_dir": "data", "dtype": torch.float32, "data": "host"}
    defaults |= {"train_samples": None, "eval_samples": None, "batch_size": 1, "max_steps": None, "epochs": 1}
    return Namespace(**(defaults | changes))


def test_every_pixel_equals_torchvisions(mnist):
    """Bit for bit, on every 100th sample of both sets; the labels are ints there and int64 here."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    torchvisions = [MNIST(mnist, train=train, transform=transform) for train in (True, False)]
    for ours, theirs in zip(load_data(flags(dataset="auto", data_dir=mnist)), torchvisions, strict=True):
        assert ours.name == "mnist" and len(ours) == len(theirs)
        for index in range(0, len(ours), 100):
            image, label = theirs[index]
            assert torch.equal(ours[index][0], image) and ours[index][1] == label


def test_a_batch_is_its_samples():
    train_set, _ = load_data(flags())
    indices = [59_999, 0, 7, 7]
    images, labels = train_set.__getitems__(indices)
    assert images.shape == (4, 1, 28, 28) and images.dtype == torch.float32
    assert labels.tolist() == [int(train_set[i][1]) for i in indices]
    assert torch.equal(images, torch.stack([train_set[i][0] for i in indices]))
    before = train_set.images.clone()
    images.zero_()
    assert torch.equal(train_set.images, before)


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damaged_mnist_is_an_error_not_an_occasion_for_other_digits(tmp_path, mnist, name, capsys):
    raw = Path(mnist) / "MNIST" / "raw"
    shutil.copytree(raw, tmp_path / "MNIST" / "raw", copy_function=shutil.copyfile)  # They may be read-only there.
    path = tmp_path / "MNIST" / "raw" / name
    flip_a_bit(path)
    with pytest.raises(UserError, match=f"{name} is damaged: .* Remove "):
        load_data(flags(dataset="auto", data_dir=tmp_path))
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("missing", MNIST_FILES)
def test_a_download_that_was_interrupted_is_not_taken_for_mnist(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", NO_MIRROR)
    raw = tmp_path / "MNIST" / "raw"
    (raw / "download-1a2b" / "MNIST" / "raw").mkdir(parents=True)
    for name in MNIST_FILES:
        (raw / "download-1a2b" / "MNIST" / "raw" / name if name == missing else raw / name).write_bytes(b"half")
    with pytest.raises(UserError, match=r"MNIST is not in .* and cannot be downloaded"):
        load_data(flags(dataset="mnist", data_dir=tmp_path))


def test_without_mnist_and_network_auto_says_loudly_what_it_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MNIST, "mirrors", NO_MIRROR)
    train_set, _ = load_data(flags(dataset="auto", data_dir=tmp_path / "empty"))
    assert train_set.name == "synthetic"
    assert not (tmp_path / "empty").exists()  # its name may be misspelt
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("NOT MNIST")]
    assert len(warnings) == 1 and "Training on the synthetic digits instead" in warnings[0]


def test_a_data_folder_that_cannot_be_made_is_an_error_or_synthetic(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Not a directory"):
        load_data(flags(dataset="mnist", data_dir=tmp_path / "file"))
    monkeypatch.setattr(MNIST, "__init__", lambda *args, **kwargs: None)  # as if it had been downloaded
    with pytest.raises(UserError, match="File name too long"):
        load_data(flags(dataset="mnist", data_dir=tmp_path / ("d" * 300)))
    assert load_data(flags(dataset="auto", data_dir=tmp_path / "file"))[0].name == "synthetic"
    assert "NOT MNIST: " in capsys.readouterr().err


def load_on_two_machines(folders: list[str], dataset: str) -> str:
    """Ranks 0 and 1 are on one machine, 2 and 3 on another, each with a data folder of its own."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % 2)
    attempts = []

    def download(self):
        attempts.append(rank)
        raise RuntimeError("no network")

    with process_group(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(MNIST, "download", download)
        try:
            name = load_data(flags(dataset=dataset, data_dir=folders[rank // 2], batch_size=4))[0].name
        except UserError as error:
            name = str(error)
        assert (attempts == []) is (rank % 2 == 1 or "mnist" in folders[rank // 2])
        return name


@pytest.mark.slow
def test_the_ranks_of_two_machines_have_the_same_digits(tmp_path, mnist):
    nowhere = str(tmp_path / "nowhere")
    assert ranks(4).run(load_on_two_machines, [nowhere, nowhere], "auto") == ["synthetic"] * 4
    assert ranks(4).run(load_on_two_machines, [mnist, mnist], "auto") == ["mnist"] * 4
    messages = ranks(4).run(load_on_two_machines, [mnist, nowhere], "auto")
    assert messages == ["the ranks have different data: rank 0 mnist, rank 2 synthetic. Name one with --dataset"] * 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_size": 64, "train_samples": 63}, "63 training samples are fewer than one batch of 64"),
        ({"batch_size": 64, "train_samples": 640, "max_steps": 11}, "11 is more than an epoch's 10 steps"),
        ({"batch_size": 64, "train_samples": 70_000, "max_steps": 1000}, "1000 is more than an epoch's 937 steps"),
        ({"batch_size": 64, "max_steps": 1, "epochs": 2}, "--max-steps 1 is for one epoch"),
    ],
)
def test_an_epoch_without_the_steps_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        load_data(flags(**changes))


def test_max_steps_is_a_training_set_of_so_many_batches():
    train_set, test_set = load_data(flags(batch_size=30, max_steps=4, train_samples=150, eval_samples=11))
    assert (len(train_set), len(test_set)) == (120, 11)


# A GPU may round a division in another way.
@pytest.mark.parametrize(
    "device, tolerance",
    [
        ("cpu", 0.0),
        pytest.param("cuda:0", 1e-6, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
    ],
)
def test_images_that_are_kept_on_the_device_make_the_same_batches(device, tolerance):
    host, _ = load_data(flags(train_samples=100))
    there, _ = load_data(flags(train_samples=100, data="device", device=torch.device(device)))
    images, labels = there.__getitems__([99, 0, 41])
    expected, expected_labels = host.__getitems__([99, 0, 41])
    assert images.device == labels.device == torch.device(device)
    assert torch.equal(labels.cpu(), expected_labels)
    assert (images.cpu() - expected).abs().max() <= tolerance
