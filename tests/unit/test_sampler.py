"""DistributedEvalSampler: a partition of the dataset, for every size, world and order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from common.eval_sampler import DistributedEvalSampler


@given(
    n=st.integers(0, 300),
    world_size=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
)
def test_every_sample_is_visited_exactly_once(n, world_size, shuffle, seed, epoch):
    shards = []
    for rank in range(world_size):
        sampler = DistributedEvalSampler(range(n), world_size, rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        shards.append(list(sampler))
        assert len(sampler) == len(shards[-1])
        assert list(sampler) == shards[-1]
    assert sorted(index for shard in shards for index in shard) == list(range(n))
    sizes = [len(shard) for shard in shards]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_shuffled_order_depends_on_the_epoch_and_equals_torchs():
    ours = DistributedEvalSampler(range(96), 4, 1, shuffle=True, seed=3)
    theirs = DistributedSampler(range(96), 4, 1, seed=3)
    orders = []
    for epoch in (0, 1):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        orders.append(list(ours))
        assert orders[-1] == list(theirs)
    assert orders[0] != orders[1]


def test_without_shuffling_memory_does_not_grow_with_the_dataset():
    sampler = DistributedEvalSampler(range(10**15), 3, 2)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(3)] == [2, 5, 8]
    assert len(sampler) == 333_333_333_333_333


@pytest.mark.parametrize("world_size, rank", [(2, 2), (2, -1), (0, 0)])
def test_a_rank_outside_the_world_is_refused(world_size, rank):
    with pytest.raises(ValueError, match="is not one of"):
        DistributedEvalSampler(range(4), world_size, rank)
