"""MNIST as tensors: the same numbers as torchvision's, faster, verified, fetched once."""

import contextlib
import gzip
import hashlib
import http.client
import http.server
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset
from torchvision import transforms
from torchvision.datasets import MNIST

from common import ladder
from common.data import collate, load_data, loading
from common.data.cache import cache_dir, one_process_at_a_time
from common.data.mnist import MNIST_FILES
from common.data.synthetic import synthetic_folder
from common.errors import UserError
from common.processes import ranks

# A mirror that refuses the connection: no network, without taking the machine's away.
NO_MIRROR = ["http://127.0.0.1:9/"]


def flags(**changes) -> Namespace:
    defaults = {"dataset": "synthetic", "data_dir": "data", "dtype": torch.float32, "data": "host"}
    return Namespace(**(defaults | {"train_samples": None, "eval_samples": None} | changes))


@pytest.fixture(scope="module")
def torchvision_sets():
    """The synthetic digits as torchvision reads, converts and normalises them."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    root = synthetic_folder().parent.parent
    return [MNIST(str(root), train=train, transform=transform) for train in (True, False)]


def test_every_pixel_equals_torchvisions(torchvision_sets):
    """Bit for bit, on every tenth sample of both sets; the labels are ints there and int64 here."""
    for ours, theirs in zip(load_data(flags()), torchvision_sets, strict=True):
        assert len(ours) == len(theirs)
        for index in range(0, len(ours), 10 if len(ours) == 10_000 else 100):
            image, label = theirs[index]
            assert torch.equal(ours[index][0], image) and ours[index][1] == label


def test_a_batch_is_its_samples(torchvision_sets):
    train_set, _ = load_data(flags())
    indices = [59_999, 0, 7, 7]
    images, labels = train_set.__getitems__(indices)
    assert images.shape == (4, 1, 28, 28) and images.dtype == torch.float32
    assert labels.tolist() == [int(train_set[i][1]) for i in indices]
    assert torch.equal(images, torch.stack([train_set[i][0] for i in indices]))
    before = train_set.images.clone()
    images.zero_()
    assert torch.equal(train_set.images, before)


def test_float64_normalises_in_float64():
    images, _ = load_data(flags(dtype=torch.float64))[0].__getitems__([0])
    assert images.dtype == torch.float64
    single, _ = load_data(flags())[0].__getitems__([0])
    assert 0 < (images - single).abs().max() < 1e-6


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["batch_size", "sampler", "batch_sampler", "subset"])
def test_loaders_and_samplers_accept_it(how, workers):
    _, test_set = load_data(flags(eval_samples=100))
    options = {
        "batch_size": {"batch_size": 32},
        "sampler": {"batch_size": 32, "sampler": RandomSampler(test_set)},
        "batch_sampler": {"batch_sampler": BatchSampler(SequentialSampler(test_set), 32, drop_last=False)},
        "subset": {"batch_size": 32},
    }[how]
    dataset = Subset(test_set, range(100)) if how == "subset" else test_set
    batches = list(DataLoader(dataset, collate_fn=collate, num_workers=workers, **options))
    assert [len(labels) for _, labels in batches] == [32, 32, 32, 4]
    seen = torch.cat([labels for _, labels in batches])
    assert seen.bincount(minlength=10).tolist() == test_set.labels.bincount(minlength=10).tolist()


def test_a_list_of_samples_is_collated_too():
    _, test_set = load_data(flags())
    images, labels = collate([test_set[0], test_set[1]])
    assert images.shape == (2, 1, 28, 28) and labels.shape == (2,)


def test_samples_can_be_limited():
    train_set, test_set = load_data(flags(train_samples=70, eval_samples=11))
    assert (len(train_set), len(test_set)) == (70, 11)


def test_real_mnist_is_found(mnist):
    train_set, test_set = load_data(flags(dataset="auto", data_dir=mnist))
    assert (train_set.name, len(train_set), len(test_set)) == ("mnist", 60_000, 10_000)
    assert train_set.labels.bincount().tolist()[:3] == [5923, 6742, 5958]  # as published


def test_loading_is_20_times_faster_than_pil_and_transforms(torchvision_sets, one_thread):
    """Batch 64, no workers, shuffled: medians of rounds that take turns."""
    ours, _ = load_data(flags())

    def seconds(loader, batches: int) -> float:
        iterator = iter(loader)
        next(iterator)
        began = time.perf_counter()
        for _ in range(batches):
            next(iterator)
        return (time.perf_counter() - began) / batches

    fast = DataLoader(ours, 64, shuffle=True, collate_fn=collate)
    slow = DataLoader(torchvision_sets[0], 64, shuffle=True)
    ratios = [seconds(slow, 10) / seconds(fast, 100) for _ in range(5)]
    assert statistics.median(ratios) >= 20, ratios


def _fake_mnist(folder: Path, source: Path) -> Path:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in MNIST_FILES:
        shutil.copy(source / name, raw / name)
    return raw


@pytest.mark.parametrize("dataset", ["auto", "mnist"])
def test_other_digits_in_mnists_place_are_refused(tmp_path, dataset, capsys):
    _fake_mnist(tmp_path, synthetic_folder())
    with pytest.raises(UserError, match="train-images-idx3-ubyte is damaged: its checksum is not the one of mnist"):
        load_data(flags(dataset=dataset, data_dir=tmp_path))
    assert capsys.readouterr().err.count("\n") == 1


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _change_magic(path: Path) -> None:
    path.write_bytes(b"\0\0\x0d\x03" + path.read_bytes()[4:])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message", [(_truncate, "truncated"), (_change_magic, "magic number"), (_flip_a_bit, "damaged")]
)
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damaged_mnist_is_an_error_not_an_occasion_for_other_digits(tmp_path, mnist, damage, message, name):
    damage(_fake_mnist(tmp_path, Path(mnist) / "MNIST" / "raw") / name)
    with pytest.raises(UserError, match=rf"{name} .*{message}.*Remove .* to have it made again"):
        load_data(flags(dataset="auto", data_dir=tmp_path))


def test_without_mnist_and_network_auto_says_loudly_what_it_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MNIST, "mirrors", NO_MIRROR)
    train_set, _ = load_data(flags(dataset="auto", data_dir=tmp_path / "empty"))
    assert train_set.name == "synthetic"
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("NOT MNIST")]
    assert len(warnings) == 1 and "Training on the synthetic digits instead" in warnings[0]


def test_without_mnist_and_network_mnist_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", NO_MIRROR)
    with pytest.raises(UserError, match="cannot be downloaded: "):
        load_data(flags(dataset="mnist", data_dir=tmp_path / "empty"))
    assert not (tmp_path / "empty").exists()  # its name may be misspelt


def test_an_answer_that_is_not_http_is_no_network(tmp_path, monkeypatch):
    def answered(*args, **kwargs):
        raise http.client.BadStatusLine("login first")

    monkeypatch.setattr(MNIST, "download", answered)
    assert load_data(flags(dataset="auto", data_dir=tmp_path / "empty"))[0].name == "synthetic"
    assert not (tmp_path / "empty").exists()


def test_a_failure_is_not_that_of_the_next_launch_with_the_same_port(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29511")
    with one_process_at_a_time("test", str(tmp_path)) as note:
        note.write("no network")
    with one_process_at_a_time("test", str(tmp_path)) as note:
        assert note.read() == "no network"
    monkeypatch.setattr("os.getppid", lambda: -1)
    with one_process_at_a_time("test", str(tmp_path)) as note:
        assert note.read() is None


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where nobody knows it
    assert cache_dir().is_absolute() and cache_dir().is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Not a directory"):
        load_data(flags(dataset="mnist", data_dir=tmp_path / "file"))


READS_ONLY = """
import sys
from argparse import Namespace
import torch
from common.data import load_data
from common.errors import UserError
settings = {"data_dir": sys.argv[1], "dtype": torch.float32, "train_samples": 1, "eval_samples": 1, "data": "host"}
try:
    load_data(Namespace(dataset="mnist", **settings))
except UserError as error:
    print(error.code)
print(load_data(Namespace(dataset="auto", **settings))[0].name)
"""


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root")
@pytest.mark.slow
def test_a_read_only_data_folder_is_an_error_or_synthetic(tmp_path):
    """A real read-only file system, in a mount namespace of its own."""
    program = tmp_path / "loads.py"
    data = tmp_path / "data"
    data.mkdir()
    program.write_text(READS_ONLY)
    mounted = f"mount -t tmpfs -o ro none {data} && exec {sys.executable} {program} {data}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted],
        capture_output=True, text=True, timeout=120, cwd=ladder.ROOT, env=os.environ | {"PYTHONPATH": str(ladder.ROOT)},
    )  # fmt: skip
    if "unshare" in done.stderr or "mount" in done.stderr.splitlines()[0]:
        pytest.skip(f"this system does not let us mount: {done.stderr.strip()}")
    assert done.stdout == "2\nsynthetic\n", done.stderr
    refused, replaced = done.stderr.splitlines()
    assert refused.startswith("error: ") and "Read-only file system" in refused
    assert replaced.startswith("NOT MNIST: ") and "Read-only file system" in replaced


class _CountingServer(http.server.ThreadingHTTPServer):
    """Serves MNIST's four files, gzipped, and counts the requests for each."""

    def __init__(self, raw: Path) -> None:
        self.files = {f"/{name}.gz": gzip.compress((raw / name).read_bytes(), 1) for name in MNIST_FILES}
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), self._Handler)

    class _Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = self.server.files[self.path]
            self.server.requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionResetError):
                self.wfile.write(content)

        def log_message(self, *_):
            pass


def _load_from(port: int, checksums: dict[str, str], data_dir: str) -> str:
    MNIST.mirrors = [f"http://127.0.0.1:{port}/"]
    MNIST.resources = [(name[1:], checksum) for name, checksum in checksums.items()]
    return load_data(flags(dataset="mnist", data_dir=data_dir))[0].name


@pytest.mark.slow
def test_ranks_that_start_at_once_download_once(tmp_path, mnist):
    server = _CountingServer(Path(mnist) / "MNIST" / "raw")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    checksums = {name: hashlib.md5(content).hexdigest() for name, content in server.files.items()}
    try:
        loaded = ranks(4).run(_load_from, server.server_port, checksums, str(tmp_path))
    finally:
        server.shutdown()
        ranks(4).stop()  # they have another MNIST class now
    assert loaded == ["mnist"] * 4
    # torchvision asks for a file twice, first to follow redirects.
    assert Counter(server.requests) == dict.fromkeys(server.files, 2)
    assert sorted(path.name for path in (tmp_path / "MNIST" / "raw").iterdir()) == sorted(MNIST_FILES)


def _load_without_network(data_dir: str) -> str:
    MNIST.mirrors = NO_MIRROR
    return load_data(flags(dataset="auto", data_dir=data_dir))[0].name


@pytest.mark.slow
def test_ranks_without_a_network_all_take_the_synthetic_digits(tmp_path):
    names = ranks(4).run(_load_without_network, str(tmp_path))
    ranks(4).stop()
    assert names == ["synthetic"] * 4


def test_the_synthetic_cache_is_verified(tmp_path, monkeypatch):
    cached = tmp_path / "parallelism-ladder" / synthetic_folder().parent.parent.name
    shutil.copytree(synthetic_folder().parent.parent, cached)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(load_data(flags())[0]) == 60_000
    assert set(json.loads((cached / "MNIST/raw/md5.json").read_text())) == set(MNIST_FILES)
    _flip_a_bit(cached / "MNIST" / "raw" / "t10k-images-idx3-ubyte")
    with pytest.raises(UserError, match="is not the one of synthetic"):
        load_data(flags())
    for damaged in ("", "[]", "{}"):
        (cached / "MNIST/raw/md5.json").write_text(damaged)
        with pytest.raises(UserError, match=r"md5\.json is damaged: .* Remove "):
            load_data(flags())


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


@pytest.mark.parametrize(
    ("device", "local_rank", "expected"),
    [("cuda", "3", "cuda:1"), ("cuda:0", "1", "cuda:0"), ("cpu", "1", "cpu")],
)
def test_each_rank_keeps_the_images_on_its_own_gpu(device, local_rank, expected, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loading.device_of_this_process(torch.device(device)) == torch.device(expected)
