"""ZeRO-1, -2 and -3, and torch's own ZeRO-1, train what one device trains. torch's FSDP: `test_same_weights.py`."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

from common import ladder
from common.args import parse_args
from common.data import collate, load_data
from common.model import build_model
from common.process_group import process_group
from common.processes import ranks
from common.settings import fit_to_machine
from common.small.zero import ZeRO1, ZeRO2, ZeRO3
from common.weights import max_weight_difference
from tests.levels import EXACT, level_00

KINDS = [ZeRO1, ZeRO2, ZeRO3, ZeroRedundancyOptimizer]
SLOW = pytest.mark.slow
LONG = pytest.mark.long


def train(kind: type, argv: list[str]) -> dict:
    """Train as level 02 does, with an optimizer of this kind; returns the whole weights."""
    args = fit_to_machine(parse_args(str(ladder.script("02_ddp_raw")), argv))
    train_set, _ = load_data(args)
    with process_group():
        sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
        share = args.batch_size // dist.get_world_size()
        loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=collate)
        network = build_model(args)
        model = network
        if kind is ZeroRedundancyOptimizer:  # It leaves the gradients to DDP.
            model = DistributedDataParallel(network)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=args.lr)
        else:
            optimizer = kind(network, AdamW, lr=args.lr)
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            for images, targets in loader:
                F.nll_loss(model(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        with optimizer.gathered() if kind is ZeRO3 else nullcontext():
            return {name: weight.clone() for name, weight in network.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=SLOW), *(pytest.param(n, marks=LONG) for n in (1, 4))])
def test_zero_trains_the_weights_of_one_device(kind, world_size):
    """No bias of BasicNet can be divided by three, nor can fc2's weight, so their parts are filled up."""
    of_ranks = ranks(world_size).run(train, kind, EXACT)
    for weights in of_ranks:
        assert max_weight_difference(weights, level_00().weights) <= 1e-9
        assert max_weight_difference(weights, of_ranks[0]) == 0
