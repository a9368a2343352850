"""What a network of somebody else's needs: the same as where it is really trained, without its memory."""

import json
import logging
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.hollow import DependsOnNumbers, hollow
from benchmarks.your_network import __main__ as program
from benchmarks.your_network import flags, measure, memory, predict, spec, strategies, training
from benchmarks.your_network.memory import Setting
from benchmarks.your_network.training import StepFailed, TooLarge
from common.errors import UserError
from common.memory import CATEGORIES, accounting
from common.process_group import process_group
from common.processes import ranks

ALL = (strategies.ONE_DEVICE, *strategies.ON_SEVERAL)


def on_ranks(path: str, number: int, devices: int, batch: int, shape: tuple[int, ...]) -> dict[str, int]:
    """What this rank, one of several that are really there, needs for steps that are really computed."""
    strategy = strategies.ON_SEVERAL[number]
    network = spec.load(path, shape)
    with process_group("gloo"), accounting() as ledger:
        mesh = init_device_mesh("cpu", (devices,))
        memory.train(network, Setting(strategy, devices), mesh, strategy.batch_of_process(batch, devices))
    (split,) = ledger.peaks().values()
    return split


@pytest.mark.parametrize("strategy", ALL, ids=lambda strategy: strategy.name)
def test_what_is_not_computed_needs_what_is_computed(texts, strategy):
    setting = Setting(strategy, devices=1 if strategy is strategies.ONE_DEVICE else 2)
    assert memory.need(texts, setting, 8).devices == memory.need(texts, setting, 8, computes=True).devices


@pytest.mark.parametrize("precision, checkpointing", [("bf16", False), ("fp16", False), ("no", True)])
def test_so_it_does_in_mixed_precision_and_with_checkpointing(texts, precision, checkpointing):
    setting = Setting(strategies.DDP, 2, precision, checkpointing)
    found = memory.need(texts, setting, 8)
    assert found.devices == memory.need(texts, setting, 8, computes=True).devices
    plain = memory.need(texts, Setting(strategies.DDP, 2), 8)
    assert found.devices[0]["activations"] < plain.devices[0]["activations"]


@pytest.fixture
def two_ranks():
    """Two ranks that are ended afterwards: they keep the gigabytes that a large network has needed."""
    yield ranks(2)
    ranks(2).stop()


OF_RANKS = [strategy for strategy in strategies.ON_SEVERAL if not strategy.one_process]
OFTEN = ("DDP", "ZeRO-2")


@pytest.mark.parametrize(
    "strategy, network",
    [
        *(
            pytest.param(
                each, "torchvision:resnet18", marks=pytest.mark.slow if each.name in OFTEN else pytest.mark.long
            )
            for each in OF_RANKS
        ),
        *(pytest.param(each, "torchvision:vgg16", marks=pytest.mark.long) for each in OF_RANKS),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_lone_rank_needs_what_ranks_need_that_compute_and_communicate(network, strategy, two_ranks):
    shape = (3, 64, 64)
    number = strategies.ON_SEVERAL.index(strategy)
    setting = Setting(strategy, 2)
    of_ranks = two_ranks.run(on_ranks, network, number, 2, 16, shape, timeout=280)
    for rank, really in enumerate(of_ranks):
        (found,) = memory.need(spec.load(network, shape), replace(setting, rank=rank), 16).devices
        assert found == really


@pytest.mark.parametrize(
    "name",
    [
        "texts",
        "resnet18",
        pytest.param("resnet50", marks=pytest.mark.slow),
        pytest.param("vgg16", marks=pytest.mark.slow),
        pytest.param("vit_b_16", marks=pytest.mark.slow),
        pytest.param("convnext_tiny", marks=pytest.mark.slow),
    ],
)
def test_parameters_gradients_and_state_are_those_of_the_network(name, texts):
    network = texts if name == "texts" else spec.load(f"torchvision:{name}")
    with torch.device("meta"):
        parameters = list(network.build().parameters())
    in_blocks = sum(-(-parameter.nbytes // 512) * 512 for parameter in parameters)
    (found,) = memory.need(network, Setting(strategies.BUCKET_VIEWS, 2), 4).devices
    assert found["parameters"] == in_blocks
    # Two moments for each parameter, and its step, a number that stays on the host.
    assert found["optimizer state"] == 2 * in_blocks
    # They lie one behind the other in buckets, each of which is rounded up to a block.
    rounded_up = found["gradients"] - sum(parameter.nbytes for parameter in parameters)
    assert 0 <= rounded_up < 512 * len(parameters)


def test_zero_shares_out_the_state_then_the_gradients_then_the_parameters(tmp_path):
    path = tmp_path / "wide.py"
    path.write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))\n"
    )
    network = spec.load(f"{path}:build", (512,))

    def split(strategy):
        return memory.need(network, Setting(strategy, 4), 8).devices[0]

    ddp, first, third = split(strategies.DDP), split(strategies.ZERO_1), split(strategies.ZERO_3)
    assert first["optimizer state"] < 0.6 * ddp["optimizer state"]
    assert third["optimizer state"] == pytest.approx(ddp["optimizer state"] / 4, rel=0.1)
    assert third["parameters"] < 0.7 * ddp["parameters"]


def test_a_network_that_is_larger_than_the_machine_can_be_asked_about(tmp_path):
    path = tmp_path / "large.py"
    path.write_text("from torch import nn\ndef build():\n    return nn.Linear(50_000, 40_000)\n")
    network = spec.load(f"{path}:build", (50_000,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = memory.need(network, Setting(strategies.ONE_DEVICE, 1), 4)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert found.most > 4 * 50_000 * 40_000 * 4
    assert grown < 2**20


def test_the_largest_batch_fits_and_a_slightly_larger_one_does_not(texts):
    setting = Setting(strategies.DDP, 2)
    known = {size: memory.need(texts, setting, size).most for size in (256, 512)}
    limit = 40 * 2**20
    batch = memory.largest_batch(texts, setting, limit, known)
    assert batch % 2 == 0
    assert memory.need(texts, setting, batch).most <= limit
    assert memory.need(texts, setting, int(batch * 1.03) + 4).most > limit
    assert memory.largest_batch(texts, setting, 2**16, known) == 0


@pytest.mark.slow
def test_batches_between_two_that_were_run_are_those_that_would_be_found_by_running_them(texts, monkeypatch):
    setting = Setting(strategies.ONE_DEVICE, 1)
    monkeypatch.setattr(memory, "GIB", 2**20)
    run = []
    need = memory.need_without_computing

    def counted(network, setting, batch):
        run.append(batch)
        return need(network, setting, batch)

    monkeypatch.setattr(memory, "need_without_computing", counted)
    found = memory.largest_batches(texts, setting, [20, 60, 240])
    assert len(run) == len(set(run)) <= 5  # two to begin with, the largest, and the smallest twice at most
    for size, batch in found.items():
        assert need(texts, setting, batch).most <= size * 2**20
        assert need(texts, setting, int(batch * 1.03) + 4).most > size * 2**20


def test_a_peak_that_is_flat_and_then_grows_by_a_square_is_followed(monkeypatch):
    """As that of large tables and of a score for each pair of samples."""

    def need(network, setting, batch):
        if batch > 100_000:
            raise TooLarge("a step")
        return memory.Need(({"activations": max(10**9, 32 * batch**2)},))

    monkeypatch.setattr(memory, "need_without_computing", need)
    found = memory.largest_batches(None, Setting(strategies.ONE_DEVICE, 1), [1, 8, 80])
    for size, batch in found.items():
        largest = (size * 2**30 / 32) ** 0.5
        assert 0.7 * largest < batch <= largest


def test_a_batch_that_this_machine_refuses_is_not_the_answer_about_a_gpu(monkeypatch):
    def need(network, setting, batch):
        if batch > 10_000:
            raise TooLarge("a step")
        return memory.Need(({"activations": 2**20 * batch},))

    monkeypatch.setattr(memory, "need_without_computing", need)
    found = memory.largest_batches(None, Setting(strategies.ONE_DEVICE, 1), [1, 8, 80])
    assert found[1] == 2**10
    assert found[8] == 2**13
    assert found[80].startswith("at least 8192: ")


def test_a_larger_gpu_never_holds_less(monkeypatch):
    """Also where the search for one size ends too soon."""
    found_by_search = {1: 100, 8: 900, 16: 800, 80: "no"}
    monkeypatch.setattr(memory, "need_without_computing", lambda *_: memory.Need(({"activations": 1},)))
    monkeypatch.setattr(memory, "largest_batch", lambda _, __, limit, ___: found_by_search[limit // 2**30])
    found = memory.largest_batches(None, Setting(strategies.ONE_DEVICE, 1), list(found_by_search))
    assert found == {1: 100, 8: 900, 16: 900, 80: "no"}


OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
gives_address_space = pytest.mark.skipif(
    OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2",
    reason="this system gives no more address space than it has memory",
)


@gives_address_space
def test_a_tensor_larger_than_the_machine_needs_no_memory():
    """It has 2**42 elements, in 16 TiB."""
    with hollow():
        large = torch.zeros(2**21, 2**21)
        product = large @ large
    assert product.shape == large.shape
    assert product.untyped_storage().nbytes() == 2**44


@gives_address_space
def test_twice_the_memory_holds_twice_the_batch_of_a_small_network(tmp_path):
    """Its largest batch has tensors that are larger than this machine's memory."""
    path = tmp_path / "small.py"
    path.write_text("from torch import nn\ndef build(): return nn.Linear(10, 3)\n")
    setting = Setting(strategies.DATA_PARALLEL, 8)
    found = memory.largest_batches(spec.load(f"{path}:build", (10,)), setting, [400, 800])
    assert found[800] == pytest.approx(2 * found[400], rel=0.05)


def test_a_peak_that_bends_is_run_and_not_taken_from_a_line():
    """The peak of 300 samples may be anything from 400 to 500 by what is known of 100, 200 and 400."""
    straight = {100: 300, 200: 400, 400: 600}
    assert memory._is_settled(straight, 300)
    assert not memory._is_settled(straight, 500)
    assert not memory._is_settled({100: 300, 200: 300, 400: 600}, 300)
    assert not memory._is_settled({200: 400, 400: 600}, 300)


def row_of(strategy, devices, peak, batches, batch=64):
    """A row as `memory.rows` makes it; `peak` in GiB."""
    split = dict.fromkeys(CATEGORIES, 0)
    split["activations"] = int((peak - 0.25) * 2**30)
    split["communication"] = 2**28
    found = {"strategy": strategy.name, "devices": devices, "batch": batch, "cannot": None}
    found |= {"peaks": [split], "computed": False}
    return found | {"largest_batch": batches and dict(zip((8, 24), batches, strict=True))}


def rows_of(alone, ddp, sharded):
    """Rows of one device and of two, by their peaks and largest batches."""
    found = [row_of(strategies.ONE_DEVICE, 1, *alone)]
    found += [row_of(strategy, 2, *ddp) for strategy in strategies.ON_SEVERAL[:3]]
    return found + [row_of(strategy, 2, *sharded) for strategy in strategies.ON_SEVERAL[3:]]


def test_the_verdict_names_the_smallest_gpu_that_holds_the_batch_and_the_largest_batch_of_it():
    take, why, change = memory.verdict(rows_of((9, (48, 200)), (5, (100, 420)), (4, (140, 460))), (8, 24))
    assert take == (
        "One GPU of 24 GiB holds batch 200 (level 00); from two GPUs on, for speed, take DDP (level 02, 03 or 04): "
        "2 GPUs of 8 GiB hold batch 100."
    )
    assert why.startswith("Why: for batch 64 DDP needs 5.00 GiB on each of 2 GPUs; its buckets cost 256 MiB")
    assert change == (
        "What would change it: a batch of more than 100 samples. There ZeRO-1 up to 140, ZeRO-2 up to 140, "
        "ZeRO-3 / FSDP up to 140, DDP on GPUs of 24 GiB up to 420, or ask with --checkpointing or --precision bf16."
    )


def test_the_verdict_advises_no_sharding_for_a_few_samples_more():
    *_, change = memory.verdict(rows_of((9, (48, 200)), (5, (100, 420)), (4, (104, 460))), (8, 24))
    assert "ZeRO" not in change
    assert "There DDP on GPUs of 24 GiB up to 420" in change
    *_, change = memory.verdict(rows_of((9, (48, 200)), (5, (100, 420)), (4, (104, 460))), (8,))
    assert change.endswith("a batch of more than 100 samples: ask with --checkpointing or --precision bf16.")


def test_the_verdict_shards_where_ddp_does_not_fit():
    take, *_ = memory.verdict(rows_of((90, (0, 0)), (40, (0, 0)), (20, (0, 70))), (8, 24))
    assert take.startswith(
        "No GPU of up to 24 GiB holds batch 64 alone, which needs 90.00 GiB; from two GPUs on, for speed, take"
    )
    assert "take ZeRO-1 (02_ddp_raw/MEMORY_AND_ZERO.md): 2 GPUs of 24 GiB hold batch 70." in take


def test_the_verdict_says_that_nothing_holds_the_batch():
    take, _, change = memory.verdict(rows_of((90, (0, 0)), (60, (0, 0)), (50, (0, 0))), (8, 24))
    assert take == "No 2 GPUs of up to 24 GiB hold batch 64: even ZeRO-1 needs 50.00 GiB on each."
    assert change == "What would change it: more GPUs, --precision bf16 or --checkpointing."


def test_the_verdict_takes_only_strategies_that_can():
    found = rows_of((9, (48, 200)), (5, (100, 420)), (4, (140, "no batch")))
    refused = {"what": "it", "reason": "ValueError: no."}
    for row in found[1:4]:
        row |= {"cannot": refused, "peaks": [], "largest_batch": None}
    take, why, change = memory.verdict(found, (8, 24))
    assert "take ZeRO-1 (02_ddp_raw/MEMORY_AND_ZERO.md): 2 GPUs of 8 GiB hold batch 140." in take
    assert why == (
        "Why: for batch 64 ZeRO-1 needs 4.00 GiB on each of 2 GPUs. DDP cannot: ValueError: no. "
        "DataParallel cannot: ValueError: no."
    )
    assert "24 GiB up to" not in change
    for row in found[4:]:
        row |= {"cannot": refused, "peaks": [], "largest_batch": None}
    take, why, _ = memory.verdict(found, (8, 24))
    assert take.endswith("(level 00). Neither DDP nor ZeRO can train this network as it is.")
    assert why == "Why: DDP cannot: ValueError: no."


@pytest.mark.parametrize("peak, size", [(5, 8), (9, 24), (90, None)])
def test_the_verdict_on_one_device_has_three_lines_too(peak, size):
    take, why, change = memory.verdict([row_of(strategies.ONE_DEVICE, 1, peak, (70, 200))], (8, 24))
    holds = {8: "holds batch 70", 24: "holds batch 200"}
    assert take.startswith(f"One GPU of {size} GiB {holds[size]}" if size else "No GPU of up to 24 GiB holds batch 64")
    assert f"it needs {peak:.2f} GiB" in why
    assert "--devices 2" in change


def test_a_shape_that_depends_on_numbers_is_noticed_and_computed(tmp_path):
    with hollow(), pytest.raises(DependsOnNumbers):
        torch.randn(100, 100).nonzero()
    path = tmp_path / "picky.py"
    path.write_text(
        "from torch import nn\n"
        "class Picky(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        scores = super().forward(x)\n"
        "        return scores + scores[scores > 0].mean()\n"
        "def build():\n"
        "    return Picky(100, 100)\n"
    )
    found = memory.need(spec.load(f"{path}:build", (100,)), Setting(strategies.ONE_DEVICE, 1), 64)
    assert found.computed


@pytest.mark.parametrize(
    "text, message",
    [
        ("resnet18", "names no network"),
        ("torchvision:resnet19", "no network 'resnet19'"),
        ("torchvision:ssd300_vgg16", "boxes"),
        ("torchvision:quantized_resnet18", "cannot be trained"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("FILE:make", "has no function 'make'"),
        ("FILE:fails", "cannot be built: ValueError: no weights"),
        ("FILE:wrong", "the forward of mine:wrong failed: RuntimeError"),
        (
            "FILE:sparse",
            "mine:sparse cannot be asked about: the gradient of 0 is sparse: its bytes depend on the numbers",
        ),
        ("FILE:lookup", "the backward of mine:lookup failed: a gradient is sparse: its bytes depend on the numbers"),
        ("FILE:two", "the optimizer of mine:two cannot be made: optimizer(parameters) must return one optimizer"),
        ("FILE:picky", "the optimizer of mine:picky failed: RuntimeError: SparseAdam does not support dense gradients"),
        ("FILE:keys", "the network returns a dict: write loss(outputs, targets)"),
        ("FILE:rows", "the loss must be a scalar tensor, not a tensor of shape (2,)"),
    ],
)
def test_what_cannot_be_asked_about_is_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def fails(): raise ValueError('no weights')\n"
        "def wrong(): return nn.Linear(5, 5)\n"
        "def rows(): return nn.Linear(4, 5)\n"
        "class Keys(nn.Linear):\n"
        "    def forward(self, x): return {'scores': super().forward(x)}\n"
        "def keys(): return Keys(4, 5)\n"
        "def sparse(): return nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 5))\n"
        "class Lookup(nn.Linear):\n"
        "    def forward(self, x): return nn.functional.embedding(x[:, 0].long(), self.weight, sparse=True)\n"
        "def lookup(): return Lookup(9, 5)\n"
        "def picky(): return nn.Linear(4, 5)\n"
        "two = picky\n"
        "def batch(n): return torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)\n"
        "def loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
    )
    if text in ("FILE:keys", "FILE:lookup", "FILE:picky"):
        path.write_text(path.read_text().partition("def loss")[0])
    if text == "FILE:two":
        path.write_text(path.read_text() + "def optimizer(p): return [torch.optim.SGD(p), torch.optim.SGD(p)]\n")
    if text == "FILE:picky":
        path.write_text(path.read_text() + "def optimizer(p): return torch.optim.SparseAdam(p)\n")
    with pytest.raises(UserError):
        program.main(["memory", text.replace("FILE", str(path)), "--batch", "2", "--devices", "1"])
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


BATCHES = """
import numpy as np
import torch
from torch import nn
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.RNN(10, 3)
    def forward(self, sounds): return self.layer(sounds)[0][-1]
def build(): return Last() if ", n," in BATCH else nn.Linear(10, 3)
def classes(n): return torch.zeros(n, dtype=torch.long)
BATCH = "EXPRESSION"
def batch(n): return EXPRESSION
"""


@pytest.mark.parametrize("question", ["memory", "predict", "measure"])
@pytest.mark.parametrize(
    "expression, message",
    [
        ("torch.zeros(4, 10), classes(4)", "batch(2) made inputs of shape (4, 10), and batch(4) of (4, 10)"),
        ("torch.zeros(5, 10), classes(5)", "batch(2) made an input of shape (5, 10)"),
        ("torch.zeros(7, n, 10), classes(n)", "batch(2) made an input of shape (7, 2, 10)"),
        ("torch.zeros(8, n, 10), classes(n)", "batch(2) made inputs of shape (8, 2, 10), and batch(4) of (8, 4, 10)"),
        ("torch.zeros(n, 10)", "batch(2) must return two things, inputs and targets, not a Tensor"),
        ("(torch.zeros(n, 10),)", "batch(2) must return two things, inputs and targets, not 1"),
        ("(np.zeros((n, 10)), np.zeros(n))", "the inputs of batch(2) must be tensors, not ndarray"),
    ],
)
def test_a_batch_that_is_none_of_so_many_samples_is_one_line(question, expression, message, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(BATCHES.replace("EXPRESSION", expression))
    with pytest.raises(UserError):
        program.main([question, f"{path}:build", "--batch", "64"])
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error


MASKED = """
import torch
from torch import nn
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
    def forward(self, words, mask): return self.attention(words, words, words, attn_mask=mask)[0][:, -1]
def build(): return Masked()
def batch(n): return {"mask": torch.ones(7, 7).tril() == 0, "words": torch.randn(n, 7, 16)}, torch.zeros(n).long()
"""


SCALED = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    width: int = 4


class Scaled(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(12, config.width)

    def forward(self, images):
        return self.linear(images.flatten(1)) * self.scale


def build():
    return Scaled(Config())
"""


def test_a_dataclass_and_a_parameter_without_dimensions_can_be_asked_about(tmp_path):
    path = tmp_path / "scaled.py"
    path.write_text(SCALED)
    network = spec.load(f"{path}:build", (3, 2, 2))
    with hollow():
        images, targets = network.batch(5)
    assert images.shape == (5, 3, 2, 2) and targets.shape == (5,)


def test_an_input_that_all_samples_share_stays_whole_except_under_data_parallel(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MASKED)
    network = training.with_shared_inputs(spec.load(f"{path}:build"))
    assert network.shared == {0}
    with pytest.raises(StepFailed, match="an input that all samples share; as a buffer of the module it stays whole"):
        memory.need(network, Setting(strategies.DATA_PARALLEL, 2), 8)
    for strategy in (strategies.DDP, strategies.ZERO_3):
        assert memory.need(network, Setting(strategy, 2), 8).most > 0
    assert predict.counted(network).multiply_adds > 0


def test_a_batch_of_too_few_samples_is_one_line(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(BATCHES.replace("EXPRESSION", "torch.zeros(50, 10)[:n], classes(n)[:50]"))
    with pytest.raises(UserError):
        program.main(["memory", f"{path}:build", "--batch", "64"])
    assert "batch(64) made an input of shape (50, 10), whose first dimension should be" in capsys.readouterr().err


def test_samples_that_were_assumed_are_named(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("from torch import nn\ndef build(): return nn.Linear(10, 3)\n")
    with pytest.raises(UserError):
        program.main(["memory", f"{path}:build", "--batch", "2", "--devices", "1"])
    error = capsys.readouterr().err
    assert "mine.py has no batch(n), so images of 3x224x224 were assumed" in error
    assert len(error.splitlines()) == 1
    path.write_text("from torch import nn\ndef build(): return nn.Sequential(nn.Flatten(), nn.Linear(150528, 3))\n")
    program.main(["predict", f"{path}:build"])
    assert "mine.py has no batch(n), so images of 3x224x224 were assumed" in capsys.readouterr().out


HELP = """
import contextlib, io, sys
from benchmarks.your_network.__main__ import parse_options
for question in ("memory", "predict", "measure", "doctor"):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        parse_options([question, "--help"])
    print(question, " ".join(text.getvalue().split()))
assert "torch" not in sys.modules
"""


def test_help_waits_for_no_torch_and_says_whose_samples_a_batch_has():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    memory_help, predict_help, measure_help, _ = done.stdout.splitlines()
    assert "samples of a step on ALL devices together (64)" in memory_help
    assert "samples of a step on EACH GPU" in predict_help
    assert "samples of a step on ALL devices together (64)" in measure_help


def test_the_flags_name_what_there_is():
    assert tuple(spec.OPTIMIZERS) == flags.OPTIMIZERS
    assert tuple(memory.PRECISIONS) == flags.PRECISIONS
    assert tuple(measure.NAMES) == flags.LEVELS


def test_the_answer_ends_in_a_verdict_and_can_be_kept(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "largest_batches", lambda *_: {1: 8})  # other tests seek them
    path = tmp_path / "answer.json"
    program.main(
        [
            "memory",
            f"{tmp_path / 'texts.py'}:build",
            "--batch",
            "8",
            "--devices",
            "2",
            "--gib",
            "1",
            "--json",
            str(path),
        ]
    )
    printed = capsys.readouterr().out
    answer = json.loads(path.read_text())
    assert [row["strategy"] for row in answer["memory"]] == [strategy.name for strategy in strategies.ON_SEVERAL]
    assert printed.splitlines()[-3:] == answer["verdict"]
    assert max(map(len, printed.splitlines()[:-3])) <= 82


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(32, 96)
        self.score = nn.Linear(32, 3)
    def forward(self, x):
        heads = self.inputs(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, dropout_p=DROPOUT)
        return self.score(y.transpose(1, 2).flatten(2).mean(dim=1))
def build(): return Attention()
def batch(n): return torch.randn(n, 200, 32), torch.zeros(n, dtype=torch.long)
"""


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_keeps_no_scores_also_where_it_drops_some(checkpointing, tmp_path):
    """A GPU's fused attention draws its dropout anew in backward. The CPU's has no dropout."""
    path = tmp_path / "attention.py"
    needs = []
    for dropout in ("0.0", "0.1"):
        path.write_text(ATTENTION.replace("DROPOUT", dropout))
        network = spec.load(f"{path}:build")
        needs.append(memory.need(network, Setting(strategies.ONE_DEVICE, 1, checkpointing=checkpointing), 8).most)
    assert needs[0] == needs[1]
    scores = 4 * 8 * 4 * 200 * 200
    assert needs[0] < scores


PAIRS = """
import torch
from torch import nn
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(8, 8)
        self.log_scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, inputs):
        rows = self.tower(inputs)
        return self.log_scale.exp() * rows @ rows.T
def build(): return Pairs()
def batch(n): return torch.randn(n, 8), torch.arange(n)
def loss(logits, targets):
    return nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(logits.T, targets)
"""


def test_a_strategy_that_cannot_take_the_network_says_why_in_its_row(tmp_path, capsys, monkeypatch):
    """A score for each pair of samples is none for DataParallel, and a scalar parameter none for fully_shard."""
    monkeypatch.setattr(memory, "largest_batches", lambda *_: {1: "a batch of 256 cannot be made: ValueError: no"})
    path = tmp_path / "pairs.py"
    path.write_text(PAIRS)
    kept = tmp_path / "answer.json"
    program.main(["memory", f"{path}:build", "--batch", "8", "--devices", "1", "2", "--gib", "1", "--json", str(kept)])
    printed = capsys.readouterr().out
    answer = json.loads(kept.read_text())
    reasons = {row["strategy"]: row["cannot"]["reason"] for row in answer["memory"] if row["cannot"]}
    assert list(reasons) == ["DataParallel", "ZeRO-2", "ZeRO-3 / FSDP"]
    assert "input batch_size (4) to match target batch_size (8)" in reasons["DataParallel"]
    assert "scalar parameters" in reasons["ZeRO-2"]
    assert "DataParallel, 2     cannot: ValueError: Expected input batch_size" in printed
    assert "one device                     ?" in printed
    assert "one device, ? for 1 GiB: a batch of 256 cannot be made" in printed
    assert "DataParallel cuts all inputs" in printed
    assert "from two GPUs on, for speed, take DDP" in answer["verdict"][0]
    assert max(map(len, printed.splitlines()[:-3])) <= 82


def test_a_network_that_fails_on_one_device_too_ends_the_question(tmp_path, capsys):
    path = tmp_path / "wrong.py"
    path.write_text("from torch import nn\ndef build(): return nn.Linear(5, 5)\n")
    with pytest.raises(UserError):
        program.main(["memory", f"{path}:build", "--input", "4", "--batch", "2", "--devices", "2"])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_batch_that_fails_in_the_search_leaves_the_sizes_that_it_does_not_matter_for(monkeypatch):
    def need(network, setting, batch):
        if batch > 20_000:
            raise StepFailed("the batch", "there are not so many samples")
        return memory.Need(({"activations": 2**20 * batch},))

    monkeypatch.setattr(memory, "need_without_computing", need)
    found = memory.largest_batches(None, Setting(strategies.ONE_DEVICE, 1), [1, 8, 80])
    assert found == {1: 2**10, 8: 2**13, 80: "the batch: there are not so many samples"}
    monkeypatch.setattr(memory, "LARGE", 20_000)
    assert set(memory.largest_batches(None, Setting(strategies.ONE_DEVICE, 1), [1, 8]).values()) == {found[80]}


BAG = """
import torch
from torch import nn
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(2000, 8, mode="MODE")
        self.score = nn.Linear(8, 3)
    def forward(self, tokens, offsets):
        return self.score(self.bag(tokens, offsets))
def build(): return Bag()
def batch(n):
    return (torch.randint(2000, (20 * n,)), torch.arange(0, 20 * n, 20)), torch.zeros(n, dtype=torch.long)
"""


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_of_tokens_need_what_they_need_where_they_are_computed(mode, tmp_path):
    path = tmp_path / "bag.py"
    path.write_text(BAG.replace("MODE", mode))
    network = spec.load(f"{path}:build")
    alone = Setting(strategies.ONE_DEVICE, 1)
    for batch in (8, 512):
        found = memory.need(network, alone, batch)
        # The CPU's kernel makes room for one index more than there are, which may take another block.
        assert memory.need(network, alone, batch, computes=True).most - found.most in (0, 512)
    assert len(memory.need(network, Setting(strategies.DATA_PARALLEL, 8), 512).peaks) == 8


def test_a_small_part_of_a_large_tensor_is_not_computed_with():
    """Its memory is nobody's: as indices it would point anywhere."""
    unwritten = torch.full((10_000,), 10**12)
    with hollow():
        tokens = unwritten.chunk(1000)[1]
        assert torch.zeros(50, 4)[tokens].shape == (10, 4)
        assert tokens.clone().max() == 0
        assert tokens.clone().new_empty(3).max() == 0


EXPERTS = """
import torch
from torch import nn
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, samples):
        chosen = self.router(samples).argmax(1)
        return DISPATCH
    def by_mask(self, samples, chosen):
        scores = torch.zeros_like(samples)
        for number, expert in enumerate(self.experts):
            rows, = torch.where(chosen == number)
            scores = scores.index_add(0, rows, expert(samples[rows]))
        return scores
    def by_counts(self, samples, chosen):
        counts = nn.functional.one_hot(chosen, 3).sum(0).tolist()
        parts = samples[chosen.argsort()].split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
    def by_loop(self, samples, chosen):
        ordered = samples[chosen.argsort()]
        ends = nn.functional.one_hot(chosen, 3).sum(0).cumsum(0)
        begins = [0, *(end.item() for end in ends[:-1])]
        parts = [ordered[begin:end] for begin, end in zip(begins, ends)]
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
def build(): return Experts()
def batch(n): return torch.randn(n, 8), torch.zeros(n).long()
"""


@pytest.mark.parametrize("dispatch", ["by_mask", "by_counts", "by_loop"])
def test_experts_that_samples_are_routed_to_are_computed_and_no_batch_is_sought(dispatch, tmp_path, monkeypatch):
    """However few the samples: small tensors are computed, but from numbers that are made up."""
    path = tmp_path / "mine.py"
    path.write_text(EXPERTS.replace("DISPATCH", f"self.{dispatch}(samples, chosen)"))
    network = spec.load(f"{path}:build")
    for batch in (2, 600):
        assert memory.need(network, Setting(strategies.ONE_DEVICE, 1), batch).computed
    row = memory._row(network, Setting(strategies.ONE_DEVICE, 1), 2, [8])
    assert (row["computed"], row["largest_batch"]) == (True, None)

    def small_only(_, setting, batch):
        if batch > 8:
            raise DependsOnNumbers("a mask")
        return memory.Need(({"activations": 1},))

    monkeypatch.setattr(memory, "need_without_computing", small_only)
    row = memory._row(network, Setting(strategies.ONE_DEVICE, 1), 8, [8])
    assert (row["computed"], row["largest_batch"]) == (True, None)


def test_a_shape_that_does_not_fit_is_raised_and_not_logged_too():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with hollow(), pytest.raises(RuntimeError):
        assert log.disabled
        torch.zeros(100, 100) @ torch.zeros(99, 100)
    assert not log.disabled


def test_a_chain_of_layers_in_a_list_is_one_block_for_checkpointing():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    stages = nn.ModuleList([block(), nn.Sequential(block(), block())])
    assert strategies.units(nn.Sequential(stages)) == [stages[0], *stages[1]]


def test_a_shape_is_refused_where_the_file_makes_the_batch(texts_file, capsys):
    with pytest.raises(UserError):
        program.main(["memory", texts_file, "--input", "3x8x8"])
    assert "has a function 'batch', which says what a sample is" in capsys.readouterr().err


def test_samples_that_devices_cannot_share_are_refused(capsys):
    with pytest.raises(UserError):
        program.main(["memory", "torchvision:resnet18", "--batch", "3", "--devices", "2"])
    assert "cannot be divided among 2" in capsys.readouterr().err
