"""ZeRO: the memory that it needs on each rank, and how the parts behave."""

import contextlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.memory import MemoryTracker, label, track_memory
from common.process_group import process_group
from common.processes import ranks
from common.small.zero import ZeRO1, ZeRO2, ZeRO3
from common.small.zero.shard import Shard
from common.weights import max_weight_difference

OURS = [ZeRO1, ZeRO2, ZeRO3]
WIDTH = 256
LAYERS = 8
LAYER = (WIDTH * WIDTH + WIDTH) * 4  # bytes
PARAMETERS = LAYERS * LAYER
BLOCK = 512  # bytes: the least that an allocation takes


class Memory(NamedTuple):
    """The bytes of a rank, by category in the second step, and the most in all at any time."""

    after_forward: dict[str, int]
    after_backward: dict[str, int]
    peak: int


def without_zero(module: nn.Module, optimizer_class: type, **settings) -> torch.optim.Optimizer:
    return optimizer_class(module.parameters(), **settings)


def shards_of(optimizer) -> list[Shard]:
    if isinstance(optimizer, ZeRO3):
        return list(optimizer.shards.values())
    return getattr(optimizer, "shards", [])


def measure(kind: Callable) -> Memory:
    with process_group(), track_memory() as tracker:
        network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to("cpu")
        optimizer = kind(network, torch.optim.AdamW, foreach=False)
        shards = shards_of(optimizer)
        for _ in range(2):
            loss = network(torch.ones(1, WIDTH)).sum()
            after_forward = label_and_count(tracker, network, shards)
            loss.backward()
            del loss
            after_backward = label_and_count(tracker, network, shards)
            optimizer.step()
            optimizer.zero_grad()
        peak = sum(tracker.peaks()[0].values())
        return Memory(after_forward, after_backward, peak)


@cache
def memory_of_ranks(kind: Callable, world_size: int) -> list[Memory]:
    return ranks(world_size).run(measure, kind)


def label_and_count(tracker: MemoryTracker, network: nn.Module, shards: list[Shard]) -> dict[str, int]:
    parts = [shard.part for shard in shards]
    for parameter in [*network.parameters(), *parts]:
        label(parameter, "parameters")
        if parameter.grad is not None:
            label(parameter.grad, "gradients")
    return tracker.now()


# The stages, and what a rank has a part of. It has the whole of the rest.
CUT = {
    without_zero: [],
    ZeRO1: ["optimizer state"],
    ZeRO2: ["optimizer state", "gradients"],
    ZeRO3: ["optimizer state", "gradients", "parameters"],
}
WHOLE = {"parameters": PARAMETERS, "gradients": PARAMETERS, "optimizer state": 2 * PARAMETERS}
# AdamW counts its steps in a tensor for each parameter, and blocks are rounded up.
SLACK = 4 * LAYERS * BLOCK
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", CUT)
def test_zero_shrinks_what_is_cut_to_one_part(kind, world_size):
    expected = {name: size / world_size if name in CUT[kind] else size for name, size in WHOLE.items()}
    for after_forward, after_backward, _ in memory_of_ranks(kind, world_size):
        for name, size in expected.items():
            assert after_backward[name] == pytest.approx(size, abs=SLACK)
        assert sum(after_backward.values()) == pytest.approx(sum(expected.values()), abs=SLACK)
        assert after_forward["parameters"] == after_backward["parameters"]


@pytest.mark.parametrize("world_size", WORLDS)
def test_each_stage_has_a_lower_peak_and_zero_3_holds_little_beside_its_parts(world_size):
    peaks = [max(rank.peak for rank in memory_of_ranks(kind, world_size)) for kind in CUT]
    assert peaks == sorted(set(peaks), reverse=True)
    layer_its_gradient_and_the_collectives = 4 * LAYER
    assert peaks[-1] <= sum(WHOLE.values()) / world_size + layer_its_gradient_and_the_collectives + SLACK


def cut_and_gather(numbers: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a parameter, and the whole after each rank has added its number to its part."""
    with process_group():
        shard = Shard(nn.Parameter(torch.arange(float(numbers))))
        part = shard.part.detach().clone()
        shard.part.data += 100 * dist.get_rank()
        shard.gather()
        return part, shard.parameter.detach().clone()


def test_ten_numbers_on_four_ranks_are_cut_as_the_docstring_says():
    assert "0 1 2     3 4 5     6 7 8     9 - -" in Shard.__doc__  # Each "-" is a zero.
    of_ranks = ranks(4).run(cut_and_gather, 10)
    assert [part.tolist() for part, _ in of_ranks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 0]]
    for _, whole in of_ranks:
        assert whole.tolist() == [0, 1, 2, 103, 104, 105, 206, 207, 208, 309]


class Tied(nn.Module):
    """One weight that two layers share, a layer whose weight is frozen, and a bias of a width that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.weight.requires_grad = False
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(values)))))


def train(kind: Callable) -> tuple[Tensor, dict]:
    """A weight of this rank as it was made, and all weights after steps of two micro-batches each."""
    with process_group():
        torch.manual_seed(dist.get_rank())
        network = Tied().double()
        before = network.first.weight.detach().clone()
        optimizer = kind(network, torch.optim.AdamW, lr=0.1)
        model = DistributedDataParallel(network) if kind is without_zero else network
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if kind is ZeRO3:
            assert network.first.weight.untyped_storage().size() == 0
            with optimizer.gathered():
                return before, {name: weight.clone() for name, weight in network.state_dict().items()}
        return before, network.state_dict()


def step_without_a_gradient(kind: Callable) -> tuple[bool, bool]:
    """A step after a forward that uses only the first of two layers: whether each has the weights that it had."""
    with process_group():
        torch.manual_seed(0)
        network = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        optimizer = kind(network, torch.optim.AdamW, lr=0.1)
        whole = optimizer.gathered if kind is ZeRO3 else contextlib.nullcontext
        with whole():
            before = [layer.weight.detach().clone() for layer in network]
        network[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with whole():
            used, unused = (torch.equal(layer.weight, old) for layer, old in zip(network, before, strict=True))
        return used, unused


@pytest.mark.parametrize("kind", OURS)
def test_a_parameter_without_a_gradient_stays_as_it_is(kind):
    assert ranks(2).run(step_without_a_gradient, kind) == [(False, True)] * 2


def gradients_after_zero_grad(kind: Callable) -> list[Tensor]:
    """The gradients of a backward that no step followed, after `zero_grad`."""
    with process_group():
        network = nn.Linear(3, 2)
        optimizer = kind(network, torch.optim.AdamW)
        network(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
        holders = [*network.parameters(), *(shard.part for shard in shards_of(optimizer))]
        return [holder.grad for holder in holders if holder.grad is not None]


@pytest.mark.parametrize("kind", OURS)
def test_zero_grad_drops_a_backward_that_no_step_followed(kind):
    assert ranks(2).run(gradients_after_zero_grad, kind) == [[], []]


@pytest.mark.parametrize("kind", OURS)
def test_shared_and_frozen_weights_and_several_micro_batches_are_trained_as_without_zero(kind):
    (_, expected), _ = ranks(2).run(train, without_zero)
    (first, weights), (second, others) = ranks(2).run(train, kind)
    assert not torch.equal(first, second)  # before rank 0's were taken over
    assert max_weight_difference(weights, others) == 0
    assert max_weight_difference(weights, expected) <= 1e-12
