"""Every level shows the network the same samples at the same step, whatever the number of processes."""

import pytest
import torch

from common import ladder
from common.args import parse_args
from common.processes import ranks
from common.run.run import Run

N, BATCH, EPOCHS, SEED = 250, 24, 2, 5
ARGV = f"--dataset synthetic --train-samples {N} --eval-samples 10 --batch-size {BATCH} --epochs {EPOCHS} --seed {SEED}"


def _seen(level: str) -> list[list[int]]:
    """Train, and return the indices of the samples of each batch, read off images that were made to carry them."""
    module, batches = ladder.load(level), []
    honest_data, honest_batches = module.load_data, Run.batches

    def load_data(args):
        sets = honest_data(args)
        sets[0].images[:, 0, 0, 0] = torch.arange(N)
        return sets

    def spy(run, loader):
        for batch in honest_batches(run, loader):
            first_pixel = batch[0][:, 0, 0, 0] if isinstance(batch, (tuple, list)) else batch["images"][:, 0, 0, 0]
            batches.append(((first_pixel * 0.3081 + 0.1307) * 255).round().int().tolist())
            yield batch

    module.load_data, Run.batches = load_data, spy
    try:
        module.train(parse_args(module.__file__, ARGV.split()))
    finally:
        Run.batches = honest_batches
    return batches


def _expected() -> list[set[int]]:
    orders = [torch.randperm(N, generator=torch.Generator().manual_seed(SEED + e)).tolist() for e in range(EPOCHS)]
    steps = N // BATCH
    return [set(order[k * BATCH : (k + 1) * BATCH]) for order in orders for k in range(steps)]


def test_the_expectation_changes_with_the_epoch():
    first, second = _expected()[: N // BATCH], _expected()[N // BATCH :]
    assert len(first) == len(second) and all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("level", ["00_single_gpu", "01_data_parallel"])
def test_one_process_sees_the_seeded_permutation(level):
    seen = _seen(level)
    assert all(len(batch) == BATCH for batch in seen)
    assert [set(batch) for batch in seen] == _expected()


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_ranks_together_see_the_seeded_permutation(world_size):
    by_rank = ranks(world_size).run(_seen, "02_ddp_raw")
    for step, expected in enumerate(_expected()):
        shards = [seen[step] for seen in by_rank]
        assert all(len(shard) == BATCH // world_size for shard in shards)
        assert set().union(*shards) == expected
