"""Every sample goes to exactly one process, in the global order, and len() is what comes: arithmetic only."""

import itertools

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from common.accelerator.sampler import (
    BatchSamplerShard,
    LookAhead,
    PartialStep,
    SeedableRandomSampler,
)

# samples, batch size of one process, processes, split_batches, even_batches, drop_last: 5040 combinations
GRID = list(itertools.product(range(21), (1, 2, 3, 5, 7), (1, 2, 3, 4, 5, 7), *[(False, True)] * 3))


def shards(n, batch, world, split, even, drop_last):
    """The shard of every process, as a list in rank order."""
    size = batch * world if split else batch
    return [
        BatchSamplerShard(BatchSampler(SequentialSampler(range(n)), size, drop_last), world, rank, split, even)
        for rank in range(world)
    ]


def visited(shard):
    """For each step: the batch, how many of its samples are real, how many processes take part, whether it is last."""
    seen = []
    reading = iter(LookAhead(shard))
    for batch in reading:
        drawn = reading.steps.popleft()
        partial = drawn.partial or PartialStep(len(batch), len(batch), shard.num_processes)
        assert type(batch) is list and partial.rows == len(batch)
        seen.append((batch, partial.num_real, partial.num_ranks_present, drawn.is_last))
    return seen


def test_every_sample_is_real_on_exactly_one_process_and_in_the_global_order():
    for shape in GRID:
        n, batch, world, _, _, drop_last = shape
        steps = itertools.zip_longest(*map(visited, shards(*shape)))
        real = [sample for step in steps for share in step if share for sample in share[0][: share[1]]]
        expected = n // (batch * world) * batch * world if drop_last else n
        assert real == list(range(expected)), shape


def test_len_is_the_number_of_batches():
    # https://github.com/huggingface/accelerate/issues/4122
    for shape in GRID:
        for shard in shards(*shape):
            assert len(shard) == len(list(shard)), shape


def test_the_last_batch_is_known_when_it_is_yielded():
    for shape in GRID:
        for shard in shards(*shape):
            flags = [last for *_, last in visited(shard)]
            assert flags == [False] * (len(flags) - 1) + [True] * bool(flags), shape


def test_processes_agree_on_who_takes_part_in_a_step():
    for shape in GRID:
        every = [visited(shard) for shard in shards(*shape)]
        for step in range(max(map(len, every))):
            present = [rank for rank, seen in enumerate(every) if step < len(seen)]
            assert present == list(range(len(present))), shape
            assert {every[rank][step][2] for rank in present} == {len(present)}, shape


def test_indices_equal_those_of_accelerate():
    theirs = pytest.importorskip("accelerate.data_loader")
    for shape in GRID:
        n, batch, world, split, even, drop_last = shape
        for rank, ours in enumerate(shards(*shape)):
            sampler = BatchSampler(SequentialSampler(range(n)), batch * world if split else batch, drop_last)
            assert list(ours) == list(theirs.BatchSamplerShard(sampler, world, rank, split, even)), shape


@pytest.mark.parametrize("sizes", [[], [3], [1, 4, 2], [2, 2, 3, 1], [4, 1, 1, 1, 2, 3, 2]])
def test_batches_of_any_size_are_sharded_whole_like_those_of_accelerate(sizes):
    theirs = pytest.importorskip("accelerate.data_loader")
    ends = list(itertools.accumulate(sizes))
    batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    for world, even in itertools.product((1, 2, 3, 4), (True, False)):
        ours = [BatchSamplerShard(batches, world, rank, even_batches=even) for rank in range(world)]
        peers = [theirs.BatchSamplerShard(batches, world, rank, even_batches=even) for rank in range(world)]
        assert [list(shard) for shard in ours] == [list(peer) for peer in peers]
        assert [len(shard) for shard in ours] == [len(list(shard)) for shard in ours]
        steps = itertools.zip_longest(*map(visited, ours))
        real = [sample for step in steps for share in step if share for sample in share[0][: share[1]]]
        assert real == list(range(sum(sizes)))


def test_a_short_batch_in_the_middle_is_an_error_where_batches_must_be_even():
    class Uneven(list):
        batch_size = 3

    batches = Uneven([[0, 1, 2], [3], [4, 5, 6], [7, 8, 9]])
    with pytest.raises(ValueError, match="even_batches=False"):
        list(BatchSamplerShard(batches, 2, 0))
    assert [list(BatchSamplerShard(batches, 2, rank, even_batches=False)) for rank in (0, 1)] == [
        [[0, 1, 2], [4, 5, 6]],
        [[3], [7, 8, 9]],
    ]


def test_a_batch_size_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="2 processes can split, not 5"):
        BatchSamplerShard(BatchSampler(range(10), 5, False), 2, 0, split_batches=True)


@pytest.mark.parametrize(("n", "seed", "epoch"), [(1, 0, 0), (10, 42, 3), (50, 2**40, 1)])
def test_the_order_is_randperm_of_seed_plus_epoch(n, seed, epoch):
    sampler = SeedableRandomSampler(range(n), data_seed=seed)
    sampler.set_epoch(epoch)
    for e in (epoch, epoch + 1):  # a full pass moves on by itself
        assert list(sampler) == torch.randperm(n, generator=torch.Generator().manual_seed(seed + e)).tolist()


@pytest.mark.parametrize("make", [tuple, torch.tensor, numpy.array], ids=["tuples", "tensors", "arrays"])
@pytest.mark.parametrize("split", [True, False])
def test_batches_need_not_be_lists(make, split):
    """The short last batch is filled up. NumPy's + would have added the sample numbers."""

    class Batches(list):
        batch_size = 4

    batches = Batches([make([0, 1, 2, 3]), make([4, 5, 6, 7]), make([8, 9])])
    seen = [[[int(n) for n in batch] for batch in BatchSamplerShard(batches, 2, rank, split)] for rank in (0, 1)]
    if split:
        assert seen == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    else:
        assert seen == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]
