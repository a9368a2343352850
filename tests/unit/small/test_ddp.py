"""The three readable steps to DistributedDataParallel train what torch's trains."""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks
from common.small.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from common.weights import max_weight_difference

IN_SMALL_BUCKETS = partial(BucketedDDP, bucket_mib=0.25)
OURS = [NaiveDDP, OverlappedDDP, BucketedDDP, IN_SMALL_BUCKETS]


def backward(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, is_last: bool) -> None:
    """The backward of one micro-batch; gradients are averaged after the last one of a step."""
    with contextlib.ExitStack() as unsynchronised:
        if not is_last and not isinstance(model, NaiveDDP):
            unsynchronised.enter_context(model.no_sync())
            with model.no_sync():  # leaving it does not end the outer one
                pass
        F.nll_loss(model(images), targets).backward()
    if is_last and isinstance(model, NaiveDDP):
        model.average_gradients()


def train(wrap: Callable[[nn.Module], nn.Module]) -> dict:
    with process_group():
        rank = dist.get_rank()
        torch.manual_seed(rank)  # each rank starts with weights of its own
        bare = BasicNet(dropout=False).double()
        before = bare.fc2.weight.detach().clone()
        model = wrap(bare)
        built = bare.fc2.weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(100 + rank)
        gradients = []
        for is_last in (True, False, True, True):
            images = torch.randn(6, 1, 28, 28, dtype=torch.float64, generator=generator)
            targets = torch.randint(10, (6,), generator=generator)
            backward(model, images, targets, is_last)
            gradients.append(bare.fc2.weight.grad.clone())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        return {"before": before, "built": built, "gradients": gradients, "weights": bare.state_dict()}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_differed_before_all_end_with_torchs_weights(world_size):
    theirs = ranks(world_size).run(train, TorchDDP)
    for wrap in OURS:
        mine = ranks(world_size).run(train, wrap)
        for our, their in zip(mine, theirs, strict=True):
            assert max_weight_difference(our["weights"], their["weights"]) <= 1e-12, wrap
        first, second, *_ = mine
        assert not torch.equal(first["before"], second["before"]), wrap
        assert torch.equal(first["built"], second["built"]), wrap
        assert torch.equal(first["built"], first["before"]), wrap
        are_equal = [torch.equal(a, b) for a, b in zip(first["gradients"], second["gradients"], strict=True)]
        assert are_equal == [True, False, True, True], wrap  # the second backward was not averaged
        assert max_weight_difference(first["weights"], second["weights"]) == 0.0, wrap


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.used(values)


def error_of_an_unused_layer() -> str:
    with process_group():
        model = BucketedDDP(Forgetful(), bucket_mib=12 / 2**20)  # one bucket for each layer
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(1, 2)).sum().backward()
        return str(error.value)


def test_a_parameter_without_a_gradient_is_named():
    for message in ranks(2).run(error_of_an_unused_layer):
        assert message.endswith("their buckets were not sent: unused.weight, unused.bias")
