"""The needs of somebody else's network are those of a real training, and finding them takes no such memory."""

from dataclasses import replace

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.rows import DATA_PARALLEL, DDP, ONE_DEVICE, totals
from benchmarks.your_network import __main__ as program
from benchmarks.your_network import memory
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.memory import largest_batch
from benchmarks.your_network.network import SMALLEST_BATCH, load
from benchmarks.your_network.settings import Setting
from benchmarks.your_network.strategies import ON_SEVERAL
from benchmarks.your_network.units import units
from common.errors import UserError
from common.memory import track_memory
from common.process_group import process_group
from common.processes import ranks
from tests.unit.benchmarks.user_network import decoder, need

ALONE = Setting(ONE_DEVICE, 1)


def on_ranks(spec: str, shape: tuple[int, ...], setting: Setting, samples: int) -> dict[str, int]:
    """The need of this rank, one of several that are really there, for steps that are really computed."""
    with process_group("gloo"), track_memory() as tracker:
        mesh = init_device_mesh("cpu", (setting.devices,))
        training = memory.Training(load(spec, shape), setting, mesh, tracker)
        for _ in range(memory.WARM_UP_STEPS):
            training.step(SMALLEST_BATCH)
        (split,) = training.need(samples)
    return split


@pytest.fixture
def two_ranks():
    """Two ranks that are ended afterwards: they keep the gigabytes that a large network has needed."""
    yield ranks(2)
    ranks(2).stop()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [strategy for strategy in ON_SEVERAL if strategy != DATA_PARALLEL])
def test_a_rank_of_a_fake_group_needs_what_ranks_need_that_compute_and_communicate(strategy, two_ranks):
    spec, shape = "torchvision:resnet18", (3, 64, 64)
    setting = Setting(strategy, 2)
    of_ranks = two_ranks.run(on_ranks, spec, shape, setting, 8, timeout=280)
    (found,) = need(load(spec, shape), setting, 8)
    assert found == of_ranks[0]


@pytest.mark.parametrize("setting", [ALONE, *(Setting(strategy, 2) for strategy in ON_SEVERAL)])
def test_fake_tensors_need_the_memory_of_real_ones(texts, setting, computed_need):
    assert need(texts, setting, 4) == computed_need(texts, setting, 4)


LOWERED = [{"autocast": torch.bfloat16}, {"autocast": torch.float16}, {"checkpointing": True}]


@pytest.mark.parametrize("lowered", LOWERED, ids=str)
def test_mixed_precision_and_checkpointing_need_fewer_activations(texts, lowered, computed_need):
    setting = Setting(DDP, 2)
    network = replace(texts, **lowered)
    found = need(network, setting, 4)
    assert found == computed_need(network, setting, 4)
    assert found[0]["activations"] < need(texts, setting, 4)[0]["activations"]


def test_a_batch_is_held_until_the_step_is_over(network_of):
    """A training's loop holds it. The peak is in the optimizer, and autocast has saved a copy in the batch's place."""
    network = network_of("def build(): return nn.Sequential(nn.Linear(4096, 1024), nn.Linear(1024, 2))", (4096,))
    network = replace(network, autocast=torch.bfloat16)
    few, many = (need(network, ALONE, samples)[0]["temporaries"] for samples in (256, 512))
    assert many - few >= 256 * 4096 * 4


@pytest.mark.parametrize("name", ["texts", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_parameters_state_and_buckets_are_those_of_the_network(name, texts):
    network = texts if name == "texts" else load(f"torchvision:{name}")
    with torch.device("meta"):
        parameters = list(network.build().parameters())
    in_blocks = sum(-(-parameter.nbytes // 512) * 512 for parameter in parameters)
    (found,) = need(network, Setting(DDP, 2), 2)
    assert found["parameters"] == in_blocks
    # Two moments for each parameter, and its step, a number that stays on the host.
    assert found["optimizer state"] == 2 * in_blocks
    # Gradients lie one behind the other in buckets, each of which is rounded up to a block.
    rounded_up = found["communication"] - sum(parameter.nbytes for parameter in parameters)
    assert 0 <= rounded_up < 512 * len(parameters)


@pytest.mark.parametrize("of_a_sample, of_a_pair", [(3 * 2**20, 0), (7, 5), (2**29, 0), (2**34, 0)])
def test_the_largest_batch_fits_and_an_eighth_more_does_not(of_a_sample, of_a_pair):
    def peak_of(samples):
        return 2**28 + samples * of_a_sample + samples**2 * of_a_pair

    limit = 24 * 2**30
    found = largest_batch(peak_of, limit)
    if found:
        assert peak_of(found) <= limit < peak_of(found + max(found // 8, 1))
    else:
        assert peak_of(SMALLEST_BATCH) > limit


def test_the_search_ends_where_a_batch_ignores_its_size():
    with pytest.raises(StepFailed, match="needs no more memory"):
        largest_batch(lambda samples: 1, limit=2)


def test_a_row_whose_large_batch_fails_has_its_need_and_says_why(written, capsys, monkeypatch):
    """The file here has 500 samples, so a larger batch fails."""
    monkeypatch.setattr(memory, "GIB", 2**20)
    path = written(
        "def build(): return nn.Linear(1024, 5)\n"
        "def batch(n): return torch.zeros(500, 1024)[:n], torch.zeros(500).long()[:n]\n"
    )
    rows = program.main(["memory", path, "--batch", "64", "--devices", "2", "--gib", "90"])
    printed = " ".join(capsys.readouterr().out.split())
    assert len(rows) == 6
    for row in rows:
        assert row.need and not row.largest
        assert str(row.search_failure) in printed


def test_weights_that_fit_only_where_they_are_shared_out_have_a_largest_batch_there(written, monkeypatch):
    monkeypatch.setattr(memory, "GIB", 2**20)
    path = written(
        "def build(): return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))\n"
        "def batch(n): return torch.zeros(n, 512), torch.zeros(n).long()\n"
    )
    rows = program.main(["memory", path, "--batch", "16", "--devices", "8", "--gib", "16"])
    largest = {row.setting.strategy: row.largest for row in rows}
    assert largest["one device"] == largest["DDP"] == 0
    assert largest["ZeRO-3 / FSDP"] > 0


LAYER = """
def build(): return nn.Sequential(nn.TransformerEncoderLayer(32, 4, 32, DROPOUT, batch_first=True), nn.Linear(32, 3))
def batch(n): return torch.randn(n, 200, 32), torch.zeros(n, 200, dtype=torch.long)
def loss(scores, classes): return F.cross_entropy(scores.flatten(0, 1), classes.flatten())
"""
ATTENTION = decoder(200, "F.scaled_dot_product_attention(*heads, dropout_p=DROPOUT)")


@pytest.mark.parametrize("text", [ATTENTION, LAYER], ids=["function", "layer"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_keeps_no_scores_also_where_it_drops_some(text, checkpointing, network_of):
    """A GPU's fused attention draws its dropout anew in backward. The CPU's has no dropout."""
    for dropout in ("0.0", "0.1"):
        network = replace(network_of(text.replace("DROPOUT", dropout)), checkpointing=checkpointing)
        assert max(totals(need(network, ALONE, 8))) < 4 * 8 * 4 * 200 * 200  # bytes of the scores


def test_a_file_may_have_dataclasses_whose_annotations_are_texts(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "@dataclass\n"
        "class Config:\n"
        "    width: int = 4\n"
        "def build(): return nn.Linear(12, Config().width)\n"
    )
    assert load(f"{path}:build", (12,)).title == "mine:build"


def test_a_chain_of_layers_in_a_list_is_one_block_for_checkpointing():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    stages = nn.ModuleList([block(), nn.Sequential(block(), block())])
    assert units(nn.Sequential(stages)) == [stages[0], *stages[1]]
    with torch.device("meta"):
        vgg = torchvision.models.vgg11()
    assert units(vgg) == [vgg.features, vgg.classifier]


WRONG = """
def fails(): raise ValueError("no weights")
def wrong(): return nn.Linear(5, 5)
def right(): return nn.Linear(4, 5)
def frozen(): return nn.Linear(4, 5).requires_grad_(False)
class Keys(nn.Linear):
    def forward(self, x): return {"scores": super().forward(x)}
def keys(): return Keys(4, 5)
def batch(n): return BATCH
"""
GOOD = "torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)"
FIFTY = "torch.zeros(50, 4)[:n], torch.zeros(n)[:50].long()"  # At most 50 samples, whatever n is.
ROWS = "def loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets, reduction='none')\n"


@pytest.mark.parametrize(
    "text, batch, more, message",
    [
        ("resnet18", GOOD, "", "names no network"),
        ("torchvision:resnet19", GOOD, "", "no classification network 'resnet19'"),
        ("nowhere.py:build", GOOD, "", "there is no Python file nowhere.py"),
        ("FILE:make", GOOD, "", "has no function 'make'"),
        ("FILE:right --input 3x8x8", GOOD, "", "has a function 'batch', which says what a sample is"),
        ("FILE:right --batch 3 --devices 2", GOOD, "", "3 samples cannot be divided among 2 devices"),
        ("FILE:fails", GOOD, "", "cannot be built: ValueError: no weights (mine.py, line 5)"),
        ("FILE:frozen", GOOD, "", "has no parameter to train"),
        ("FILE:wrong", GOOD, "", "the forward of mine:wrong failed: RuntimeError"),
        ("FILE:keys", GOOD, "", "returns a dict and no tensor: write loss(outputs, targets)"),
        ("FILE:right", GOOD, ROWS, "must be a scalar tensor"),
        ("FILE:right --checkpointing", GOOD, "", "the network has no container"),
        ("FILE:right --batch 64", FIFTY, "", "an input of shape (50, 4)"),
    ],
)
def test_what_cannot_be_asked_about_is_one_line(text, batch, more, message, written, capsys):
    path = written(WRONG.replace("BATCH", batch) + more).removesuffix(":build")
    name, *flags = text.replace("FILE", path).split()
    with pytest.raises(UserError):
        program.main(["memory", name, "--batch", "2", "--devices", "1", *flags])
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_a_strategy_that_cannot_take_the_network_says_why_in_its_row(written, capsys):
    """A score for each pair of samples is none for DataParallel, and a scalar parameter none for fully_shard."""
    path = written(
        "class Pairs(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(8, 8)\n"
        "        self.log_scale = nn.Parameter(torch.tensor(1.0))\n"
        "    def forward(self, inputs):\n"
        "        rows = super().forward(inputs)\n"
        "        return self.log_scale.exp() * rows @ rows.T\n"
        "def build(): return Pairs()\n"
        "def batch(n): return torch.randn(n, 8), torch.arange(n)\n"
        "def loss(logits, targets): return F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)\n"
    )
    rows = program.main(["memory", path, "--batch", "8", "--devices", "2", "--gib", "1"])
    printed = capsys.readouterr().out
    assert [row.setting.name for row in rows] == ["one device", "DDP, 2", "ZeRO-1, 2"]
    (ddp,) = [line.split() for line in printed.splitlines() if line.startswith("DDP, 2")]
    assert ddp[-2] == "–"  # rank 0 stands for all
    failures = " ".join(printed.split())
    assert "DataParallel, 2: the loss of mine:build failed: ValueError" in failures
    assert "input batch_size (2) to match target batch_size (4)" in failures
    for strategy in ("ZeRO-2", "ZeRO-3 / FSDP"):
        assert f"{strategy}, 2: {strategy} cannot wrap mine:build: ValueError: fully_shard" in failures
    assert max(map(len, printed.splitlines())) <= 80
