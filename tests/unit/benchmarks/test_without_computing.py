"""Training without computing: what has no memory is never computed with, nor are its numbers read."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.without_computing import without_computing
from benchmarks.your_network import memory, strategies
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.memory import Setting

ALONE = Setting(strategies.ONE_DEVICE, 1)
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@pytest.mark.skipif(
    OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2",
    reason="this system gives no more address space than it has memory",
)
def test_a_tensor_larger_than_the_machine_needs_no_memory():
    """It has 2**42 elements, in 16 TiB."""
    with without_computing():
        large = torch.zeros(2**21, 2**21)
        product = large @ large
    assert product.shape == large.shape
    assert product.untyped_storage().nbytes() == 2**44


class RefusesHalfPrecision(TorchDispatchMode):
    """A CPU whose oneDNN has no LSTM in half precision."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        computes = not isinstance(args[0], FakeTensor) if args else False
        if computes and "rnn_layer" in str(func) and args[0].dtype != torch.float32:
            raise RuntimeError("could not create a primitive")
        return func(*args, **(kwargs or {}))


def test_half_precision_is_not_computed_however_small_the_tensors(network_of):
    """Not every CPU computes with it."""
    network = network_of(
        "class Spoken(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.LSTM(6, 8, batch_first=True)\n"
        "        self.score = nn.Linear(8, 3)\n"
        "    def forward(self, sounds): return self.score(self.layer(sounds)[0][:, -1])\n"
        "def build(): return Spoken()\n"
        "def batch(n): return torch.zeros(n, 5, 6), torch.zeros(n).long()\n"
    )
    with RefusesHalfPrecision():
        for precision in ("bf16", "fp16"):
            assert memory.need(network, replace(ALONE, precision=precision), 2).most > 0


@pytest.mark.parametrize("rows", [2, 2**15])
def test_a_network_whose_shapes_depend_on_numbers_is_refused(rows, network_of):
    network = network_of(
        "class Chosen(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x[x[:, 0] > 0])\n"
        "def build(): return Chosen(64, 3)\n"
        "def batch(n): return torch.randn(n, 64), torch.zeros(n).long()\n"
    )
    with pytest.raises(StepFailed, match="DependsOnNumbers"):
        memory.need(network, ALONE, rows)


def test_a_small_part_of_a_large_tensor_is_not_computed_with():
    """Its memory is nobody's: as indices it would point anywhere."""
    unwritten = torch.full((10_000,), 10**12)
    with without_computing():
        tokens = unwritten.chunk(1000)[1]
        assert torch.zeros(50, 4)[tokens].shape == (10, 4)
        assert tokens.clone().max() == 0
        assert tokens.clone().new_empty(3).max() == 0


def test_a_shape_that_does_not_fit_is_raised_and_not_logged_too():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with without_computing(), pytest.raises(RuntimeError):
        assert log.disabled
        torch.zeros(100, 100) @ torch.zeros(99, 100)
    assert not log.disabled


BAG = """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(2000, 8, mode="sum")
        self.score = nn.Linear(8, 3)
    def forward(self, tokens, offsets): return self.score(self.bag(tokens, offsets))
def build(): return Bag()
def batch(n): return (torch.randint(2000, (20 * n,)), torch.arange(0, 20 * n, 20)), torch.zeros(n, dtype=torch.long)
"""


def test_bags_of_tokens_need_what_they_need_where_they_are_computed(network_of, computed_need):
    network = network_of(BAG)
    for batch in (8, 512):
        found = memory.need(network, ALONE, batch)
        # The CPU's kernel makes room for one index more than there are, which may take another block.
        assert computed_need(network, ALONE, batch).most - found.most in (0, 512)
