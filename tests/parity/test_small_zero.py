"""ZeRO-1, -2 and -3 train what one device trains, and what torch's own train."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from common import ladder
from common.args import parse_args
from common.data import collate, load_data
from common.machine import fit_to_machine
from common.model import build_model
from common.process_group import process_group
from common.processes import ranks
from common.small.zero import ZeRO1, ZeRO2, ZeRO3
from tests.levels import EXACT, farthest, level_00

OURS = [ZeRO1, ZeRO2, ZeRO3]
ADAMW = torch.optim.AdamW


def ddp(module: nn.Module, **settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(module)
    return model, ZeroRedundancyOptimizer(model.parameters(), ADAMW, **settings)


def fsdp(module: nn.Module, **settings) -> tuple[nn.Module, torch.optim.Optimizer]:
    for layer in module.children():
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(module)
    return module, ADAMW(module.parameters(), **settings)


def train(kind, argv: list[str]) -> dict:
    """Train as level 02 does, with an optimizer or wrapper `kind`; returns the whole weights."""
    args = fit_to_machine(parse_args(str(ladder.script("02_ddp_raw")), argv))
    train_set, _ = load_data(args)
    with process_group():
        sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
        share = args.batch_size // dist.get_world_size()
        loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=collate)
        bare = build_model(args)
        if kind in OURS:
            model, optimizer = bare, kind(bare, ADAMW, lr=args.lr)
        else:
            model, optimizer = kind(bare, lr=args.lr)
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, targets in loader:
                F.nll_loss(model(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        with optimizer.gathered() if kind is ZeRO3 else nullcontext():
            return {name: whole(weight).clone() for name, weight in bare.state_dict().items()}


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    "world_size",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)),
        *(pytest.param(n, marks=pytest.mark.long) for n in (1, 4)),
    ],
)
def test_zero_trains_the_weights_of_one_device(kind, world_size):
    """No parameter of BasicNet but fc1's divides by three, so parts are filled up."""
    of_ranks = ranks(world_size).run(train, kind, EXACT)
    for weights in of_ranks:
        assert farthest(weights, level_00()[1]) <= 1e-9
        assert farthest(weights, of_ranks[0]) == 0


@pytest.mark.parametrize("ours, torchs", [pytest.param(ZeRO1, ddp, marks=pytest.mark.slow), (ZeRO3, fsdp)])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_zero_trains_the_weights_of_torchs(ours, torchs, world_size):
    [mine, *_] = ranks(world_size).run(train, ours, EXACT)
    [theirs, *_] = ranks(world_size).run(train, torchs, EXACT)
    assert farthest(mine, theirs) <= 1e-12
