"""The memory of somebody else's network is that of a real training, and finding it takes no such memory."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness.records import totals
from benchmarks.harness.rows import DATA_PARALLEL, DDP, ONE_DEVICE
from benchmarks.your_network import __main__ as program
from benchmarks.your_network import memory, simulated_training
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.fused_attention import fused_attention
from benchmarks.your_network.memory import largest_batch
from benchmarks.your_network.simulated_training import Peaks, Training, fake_group, wrap
from benchmarks.your_network.spec import load
from benchmarks.your_network.strategies import PARALLEL_STRATEGIES, ZERO_3, Setting
from benchmarks.your_network.units import checkpoint_units, units
from benchmarks.your_network.user_network import SMALLEST_BATCH, UserNetwork
from common.errors import UserError
from common.memory import track_memory
from common.process_group import process_group
from common.processes import ranks
from tests.unit.benchmarks.example_networks import SENTENCES_SPEC, decoder, simulated_peaks

ALONE = Setting(ONE_DEVICE, 1)


def measure_on_a_rank(spec: str, shape: tuple[int, ...], setting: Setting, samples: int) -> Peaks:
    """The peaks of this rank, one of several that are really there, for steps that are really computed."""
    with process_group("gloo"), track_memory() as tracker:
        mesh = init_device_mesh("cpu", (setting.devices,))
        training = Training(load(spec, shape), setting, mesh, tracker)
        training.warm_up()
        return training.peaks_of_step(samples)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [strategy for strategy in PARALLEL_STRATEGIES if strategy != DATA_PARALLEL])
def test_a_rank_of_a_fake_group_takes_what_ranks_take_that_compute_and_communicate(strategy):
    spec, shape = "torchvision:resnet18", (3, 64, 64)
    setting = Setting(strategy, 2)
    measured, _ = ranks(2).run(measure_on_a_rank, spec, shape, setting, 8, timeout=280)
    assert simulated_peaks(load(spec, shape), setting, 8) == measured


def computed_peaks(network: UserNetwork, setting: Setting, samples: int) -> Peaks:
    with mock.patch.object(simulated_training, "without_computing", fused_attention):
        return simulated_peaks(network, setting, samples)


@pytest.mark.parametrize("setting", [ALONE, *(Setting(strategy, 2) for strategy in PARALLEL_STRATEGIES)])
def test_a_step_without_computing_takes_the_memory_of_a_real_one(sentences, setting):
    assert simulated_peaks(sentences, setting, 4) == computed_peaks(sentences, setting, 4)


@pytest.mark.parametrize(
    "changes", [{"autocast": torch.bfloat16}, {"autocast": torch.float16}, {"checkpointing": True}], ids=str
)
def test_mixed_precision_and_checkpointing_keep_fewer_activations(sentences, changes):
    setting = Setting(DDP, 2)
    network = replace(sentences, **changes)
    (peaks,) = simulated_peaks(network, setting, 4)
    assert [peaks] == computed_peaks(network, setting, 4)
    (in_float32,) = simulated_peaks(sentences, setting, 4)
    assert peaks["activations"] < in_float32["activations"]


def test_a_batch_is_held_until_the_step_is_over(write_network):
    """A training's loop holds it. The peak is in the optimizer, and autocast has saved a copy in the batch's place."""
    spec = write_network("def build(): return nn.Sequential(nn.Linear(4096, 1024), nn.Linear(1024, 2))")
    network = replace(load(spec, (4096,)), autocast=torch.bfloat16)
    (few,), (many,) = (simulated_peaks(network, ALONE, samples) for samples in (256, 512))
    assert many["temporaries"] - few["temporaries"] >= 256 * 4096 * 4


def test_parameters_state_and_buckets_are_those_of_the_network(sentences):
    parameters = list(sentences.build().parameters())
    in_blocks = sum(-(-parameter.nbytes // 512) * 512 for parameter in parameters)
    (peaks,) = simulated_peaks(sentences, Setting(DDP, 2), 2)
    assert peaks["parameters"] == in_blocks
    # Two moments for each parameter, and its step, a number that stays on the host.
    assert peaks["optimizer state"] == 2 * in_blocks
    # Gradients lie one behind the other in buckets, each of which is rounded up to a block.
    rounded_up = peaks["communication"] - sum(parameter.nbytes for parameter in parameters)
    assert 0 <= rounded_up < 512 * len(parameters)


@pytest.mark.parametrize("of_a_sample, of_a_pair", [(3 * 2**20, 0), (7, 5), (2**29, 0), (2**34, 0)])
def test_the_largest_batch_fits_and_an_eighth_more_does_not(of_a_sample, of_a_pair):
    bytes_of = mock.Mock(side_effect=lambda samples: 2**28 + samples * of_a_sample + samples**2 * of_a_pair)
    limit = 24 * 2**30
    found = largest_batch(bytes_of, limit)
    assert bytes_of.call_count <= 20
    assert max(call.args[0] for call in bytes_of.call_args_list) <= 2 * max(found, 1)  # no step is far too large
    if found:
        assert bytes_of(found) <= limit < bytes_of(found + max(found // 8, 1))
    else:
        assert bytes_of(SMALLEST_BATCH) > limit


def test_the_search_ends_where_a_batch_ignores_its_size():
    with pytest.raises(StepFailed, match="needs no more memory"):
        largest_batch(lambda samples: 1, limit=2)


def test_a_row_whose_large_batch_fails_has_its_peaks_and_says_why(write_network, capsys, monkeypatch):
    """The file here has 500 samples, so a larger batch fails."""
    monkeypatch.setattr(memory, "GIB", 2**20)
    spec = write_network(
        "def build(): return nn.Linear(1024, 5)\n"
        "def batch(n): return torch.zeros(500, 1024)[:n], torch.zeros(500).long()[:n]\n"
    )
    rows = program.main(["memory", spec, "--batch", "64", "--devices", "2", "--gib", "90"])
    printed = " ".join(capsys.readouterr().out.split())
    assert len(rows) == 6
    for row in rows:
        assert row.peaks and isinstance(row.fits, StepFailed)
        assert str(row.fits) in printed and "the first dimension" in str(row.fits)


def test_weights_that_fit_only_where_they_are_shared_out_have_a_largest_batch_there(write_network, monkeypatch):
    monkeypatch.setattr(memory, "GIB", 2**20)
    spec = write_network(
        "def build(): return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))\n"
        "def batch(n): return torch.zeros(n, 512), torch.zeros(n).long()\n"
    )
    rows = program.main(["memory", spec, "--batch", "16", "--devices", "8", "--gib", "16"])
    fits = {row.setting.strategy: row.fits for row in rows}
    assert fits["one device"] == fits["DDP"] == 0
    assert fits["ZeRO-3 / FSDP"] > 0


LAYER = """
def build(): return nn.Sequential(nn.TransformerEncoderLayer(32, 4, 32, DROPOUT, batch_first=True), nn.Linear(32, 3))
def batch(n): return torch.randn(n, 200, 32), torch.zeros(n, 200, dtype=torch.long)
def loss(scores, classes): return F.cross_entropy(scores.flatten(0, 1), classes.flatten())
"""
ATTENTION = decoder(200, "F.scaled_dot_product_attention(*heads, dropout_p=DROPOUT)")


@pytest.mark.parametrize("text", [ATTENTION, LAYER], ids=["function", "layer"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", ["0.0", "0.1"])
def test_attention_keeps_no_scores_also_where_it_drops_some(text, checkpointing, dropout, write_network):
    """A GPU's fused attention draws its dropout anew in backward. The CPU's has no dropout."""
    network = replace(load(write_network(text.replace("DROPOUT", dropout))), checkpointing=checkpointing)
    bytes_of_scores = 4 * 8 * 4 * 200 * 200
    assert max(totals(simulated_peaks(network, ALONE, 8))) < bytes_of_scores


def test_a_chain_of_layers_in_a_list_is_one_unit():
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    stages = nn.ModuleList([block(), nn.Sequential(block(), block())])
    assert list(units(nn.Sequential(stages))) == [stages[0], *stages[1]]
    with torch.device("meta"):
        vgg = torchvision.models.vgg11()
    assert list(units(vgg)) == [vgg.features, vgg.classifier]


def test_a_unit_that_two_parents_have_is_wrapped_once():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    model = checkpoint_units(nn.Sequential(nn.Sequential(blocks), nn.Sequential(blocks)))
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 2
    with fake_group(2) as mesh:
        wrap(model, ZERO_3, mesh)  # raises for a module that is sharded already


def refusal(capsys, *arguments: str) -> str:
    with pytest.raises(UserError):
        program.main(["memory", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    return line


LINEAR = """
def build(): return nn.Linear(4, 5)
def batch(n): return torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)
"""


@pytest.mark.parametrize(
    "spec, message",
    [
        ("resnet18", "names no network"),
        ("torchvision:resnet19", "no classification network 'resnet19'"),
        ("nowhere.py:build", "there is no Python file nowhere.py"),
        (SENTENCES_SPEC.replace(":build", ":make"), "has no function 'make'"),
    ],
)
def test_a_network_that_is_not_there_is_one_line(spec, message, capsys):
    assert message in refusal(capsys, spec)


KEYS = """
class Keys(nn.Linear):
    def forward(self, x): return {"scores": super().forward(x)}
def build(): return Keys(4, 5)
"""


@pytest.mark.parametrize(
    "change, flags, message",
    [
        ("", "--input 3x8x8", "has a function 'batch', which says what a sample is"),
        ("loss = 'mean'", "", "has 'loss', which is not a function"),
        ("", "--batch 3 --devices 2", "3 samples cannot be divided among 2 devices"),
        ("", "--checkpointing", "the network has no container"),
        ("def build(): raise ValueError('no file')", "", "cannot be built: ValueError: no file (mine.py, line 7)"),
        ("def build(): return nn.Linear(4, 5).requires_grad_(False)", "", "has no parameter to train"),
        ("def build(): return nn.Linear(5, 5)", "", "the forward of mine:build failed: RuntimeError"),
        (KEYS, "", "returns a dict and no tensor: write loss(outputs, targets)"),
        ("def loss(*args): return F.cross_entropy(*args, reduction='none')", "", "must be a scalar tensor"),
        ("def batch(n): return torch.zeros(50, 4)[:n], torch.zeros(50).long()[:n]", "", "an input of shape (50, 4)"),
    ],
)
def test_a_network_that_cannot_train_as_it_was_asked_is_one_line(change, flags, message, write_network, capsys):
    assert message in refusal(capsys, write_network(LINEAR + change), *flags.split())
