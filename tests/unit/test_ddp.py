"""The readable DistributedDataParallel trains what torch's trains."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from common.ddp import DistributedDataParallel
from common.model import BasicNet
from tests.levels import farthest
from tests.workers import ranks


def _train(ours: bool) -> dict:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        torch.manual_seed(rank)  # each rank starts with weights of its own
        bare = BasicNet(dropout=False).double()
        before = bare.fc2.weight.detach().clone()
        model = (DistributedDataParallel if ours else TorchDDP)(bare)
        built = bare.fc2.weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(100 + rank)
        gradients = []
        for step in range(4):
            images = torch.randn(6, 1, 28, 28, dtype=torch.float64, generator=generator)
            targets = torch.randint(10, (6,), generator=generator)
            if step == 1:  # accumulate: this rank's own gradient, added to by the next step
                with model.no_sync():
                    F.nll_loss(model(images), targets).backward()
                gradients.append(bare.fc2.weight.grad.clone())
                continue
            F.nll_loss(model(images), targets).backward()
            gradients.append(bare.fc2.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        return {"before": before, "built": built, "gradients": gradients, "weights": bare.state_dict()}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ours_and_torchs_end_with_the_same_weights(world_size):
    mine, theirs = ranks(world_size).run(_train, True), ranks(world_size).run(_train, False)
    for our, their in zip(mine, theirs, strict=True):
        assert farthest(our["weights"], their["weights"]) <= 1e-12
    assert farthest(mine[0]["weights"], mine[1]["weights"]) == 0.0


def test_ranks_differ_before_and_agree_after():
    first, second = ranks(2).run(_train, True)
    assert not torch.equal(first["before"], second["before"])
    assert torch.equal(first["built"], second["built"]) and torch.equal(first["built"], first["before"])
    for step, (one, other) in enumerate(zip(first["gradients"], second["gradients"], strict=True)):
        assert torch.equal(one, other) == (step != 1)  # step 1 ran under no_sync
