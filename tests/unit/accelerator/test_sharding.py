"""Every sample goes to exactly one process, in the global order, whatever the sampler and the sizes."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from common.accelerator import data_loader
from common.accelerator.data_loader import prepare_data_loader, skip_first_batches
from common.accelerator.sampler import BatchSamplerShard, DistributedEvalSampler
from tests.peers import import_or_skip
from tests.toys import Numbers, SizedStream, Stream
from tests.unit.accelerator.several_processes import DISPATCHING, gathered, played_loaders


class Shape(NamedTuple):
    """A number of samples, and how processes share them. `batch_size` is that of one process."""

    samples: int
    batch_size: int
    processes: int
    split_batches: bool
    even_batches: bool
    drop_last: bool

    @property
    def loader_batch_size(self):
        return self.batch_size * self.processes if self.split_batches else self.batch_size

    @property
    def sharing(self):
        return {"split_batches": self.split_batches, "even_batches": self.even_batches}

    def without_dropped(self, order):
        step = self.batch_size * self.processes
        return order[: len(order) // step * step] if self.drop_last else order


SHAPES = st.builds(
    Shape,
    samples=st.integers(1, 20),
    batch_size=st.integers(1, 5),
    processes=st.integers(1, 4),
    split_batches=st.booleans(),
    even_batches=st.booleans(),
    drop_last=st.booleans(),
)


def seeded():
    return torch.Generator().manual_seed(5)


def samplers(n):
    return {
        "sequential": SequentialSampler(range(n)),
        "list": list(range(0, n, 2)),
        "random": RandomSampler(range(n), generator=seeded()),
        "subset": SubsetRandomSampler(range(0, n, 2), generator=seeded()),
        "weighted": WeightedRandomSampler(range(1, n + 1), 2 * n, generator=seeded()),
    }


def loaders_of(sampler, shape):
    """Loaders that make the same batches of what a sampler draws, by each of DataLoader's ways."""
    data = Numbers(shape.samples)
    batches = BatchSampler(sampler, shape.loader_batch_size, shape.drop_last)
    return [
        DataLoader(data, shape.loader_batch_size, sampler=sampler, drop_last=shape.drop_last),
        DataLoader(data, batch_sampler=batches),
        DataLoader(data, sampler=batches, batch_size=None),
    ]


@settings(max_examples=120)
@given(shape=SHAPES, order=st.sampled_from(sorted(samplers(1))), way=st.integers(0, 2))
def test_each_real_sample_is_gathered_once_for_every_sampler(shape, order, way):
    # https://github.com/huggingface/accelerate/issues/1674 and /issues/226
    loaders = played_loaders(
        shape.processes, lambda: loaders_of(samplers(shape.samples)[order], shape)[way], **shape.sharing
    )
    assert gathered(loaders) == shape.without_dropped(list(samplers(shape.samples)[order]))


def loaders_without_a_sampler(data, shape):
    return played_loaders(
        shape.processes,
        lambda: DataLoader(data, batch_size=shape.loader_batch_size, drop_last=shape.drop_last),
        **shape.sharing,
    )


@settings(max_examples=120)
@given(shape=SHAPES, kind=st.sampled_from([Numbers, Stream]), skips=st.lists(st.integers(0, 3), max_size=2))
def test_skipping_leaves_out_whole_steps_and_still_gathers_each_sample_once(shape, kind, skips):
    # https://github.com/huggingface/accelerate/pull/4235: the padding stayed in after skip_first_batches.
    data = Numbers(shape.samples) if kind is Numbers else Stream(range(shape.samples))
    loaders = loaders_without_a_sampler(data, shape)
    for number in skips:
        loaders = [skip_first_batches(loader, number) for loader in loaders]
    skipped = sum(skips) * shape.batch_size * shape.processes
    assert gathered(loaders) == shape.without_dropped(list(range(shape.samples)))[skipped:]


# Numbers with split_batches are missing: skipped before `prepare`, they are refused, see below.
@pytest.mark.parametrize(
    ("data", "world", "how"),
    [
        pytest.param(Numbers(10), 1, DISPATCHING, id="numbers, dispatched"),
        pytest.param(Numbers(10), 2, {}, id="numbers"),
        pytest.param(Stream(range(10)), 1, DISPATCHING, id="a stream, dispatched"),
        pytest.param(Stream(range(10)), 2, {}, id="a stream"),
        pytest.param(Stream(range(10)), 2, {"split_batches": True}, id="a stream, split"),
    ],
)
def test_skipping_before_prepare_stays_skipped(data, world, how):
    loaders = played_loaders(world, lambda: skip_first_batches(DataLoader(data, batch_size=2), 2), **how)
    assert gathered(loaders) == list(range(4, 10))


def test_a_part_of_a_step_that_a_stream_skips_before_prepare_is_refused():
    with pytest.raises(ValueError, match="1 skipped batches are no whole number"):
        played_loaders(2, lambda: skip_first_batches(DataLoader(Stream(range(10)), batch_size=2), 1))


@settings(max_examples=120)
@given(shape=SHAPES, kind=st.sampled_from([Numbers, SizedStream]), skip=st.integers(0, 3))
def test_len_is_the_number_of_batches_also_of_streams_and_after_skipping(shape, kind, skip):
    # https://github.com/huggingface/accelerate/issues/4122
    data = Numbers(shape.samples) if kind is Numbers else SizedStream(range(shape.samples))
    for loader in loaders_without_a_sampler(data, shape):
        assert len(loader) == len(list(loader))
        rest = skip_first_batches(loader, skip)
        assert len(rest) == len(list(rest))


def test_indices_equal_those_of_accelerate():
    theirs = import_or_skip("accelerate.data_loader")
    booleans = (False, True)
    for shape in itertools.starmap(
        Shape, itertools.product(range(21), (1, 2, 3, 5, 7), (1, 2, 3, 4, 5, 7), booleans, booleans, booleans)
    ):
        batches = BatchSampler(SequentialSampler(range(shape.samples)), shape.loader_batch_size, shape.drop_last)
        for rank in range(shape.processes):
            arguments = batches, shape.processes, rank, shape.split_batches, shape.even_batches
            assert list(BatchSamplerShard(*arguments)) == list(theirs.BatchSamplerShard(*arguments)), shape


def test_skipping_before_prepare_leaves_a_rest_that_is_dealt_out_as_by_accelerate():
    """Neither library knows the batch size then: whole batches are repeated, and none is split."""
    theirs = import_or_skip("accelerate.data_loader")
    for n, drop_last, even, world in itertools.product((7, 9, 10), (False, True), (False, True), (2, 3)):
        plain = DataLoader(Numbers(n), 2, drop_last=drop_last)
        for skip, rank in itertools.product((1, 2, 3), range(world)):
            seen = []
            for library in (data_loader, theirs):
                rest = library.skip_first_batches(plain, skip)
                loader = library.prepare_data_loader(rest, num_processes=world, process_index=rank, even_batches=even)
                seen.append(list(loader.batch_sampler))
            assert seen[0] == seen[1]
    for library in (data_loader, theirs):
        with pytest.raises(ValueError, match="split_batches"):
            library.prepare_data_loader(library.skip_first_batches(DataLoader(Numbers(9), 2), 1), split_batches=True)


@pytest.mark.parametrize("sizes", [[], [3], [1, 4, 2], [2, 2, 3, 1], [4, 1, 1, 1, 2, 3, 2]])
def test_batches_of_any_size_are_sharded_whole_like_those_of_accelerate(sizes):
    theirs = import_or_skip("accelerate.data_loader")
    numbers = iter(range(sum(sizes)))
    batches = [list(itertools.islice(numbers, size)) for size in sizes]
    for world, even in itertools.product((1, 2, 3, 4), (True, False)):
        for rank in range(world):
            ours = BatchSamplerShard(batches, world, rank, even_batches=even)
            assert list(ours) == list(theirs.BatchSamplerShard(batches, world, rank, even_batches=even))
            assert len(ours) == len(list(ours))
        loaders = played_loaders(
            world, lambda: DataLoader(Numbers(sum(sizes)), batch_sampler=batches), even_batches=even
        )
        assert gathered(loaders) == list(range(sum(sizes)))


class Batches(list):
    batch_size = 4


def test_a_short_batch_in_the_middle_is_an_error_where_batches_must_be_even():
    batches = Batches([[0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11, 12]])
    with pytest.raises(ValueError, match="even_batches=False"):
        list(BatchSamplerShard(batches, 2, 0))
    with pytest.raises(ValueError, match="without split_batches"):
        list(BatchSamplerShard(batches, 2, 0, split_batches=True, even_batches=False))
    assert [list(BatchSamplerShard(batches, 2, rank, even_batches=False)) for rank in (0, 1)] == [
        [[0, 1, 2, 3], [5, 6, 7, 8]],
        [[4], [9, 10, 11, 12]],
    ]
    batches.drop_last = True
    assert list(BatchSamplerShard(batches, 2, 0, True, even_batches=False)) == [[0, 1], [5, 6], [9, 10]]


@pytest.mark.parametrize("sharing", [{}, {"split_batches": True}, {"split_batches": True, "even_batches": False}])
def test_a_batch_larger_than_the_batch_size_is_an_error_where_samples_would_be_lost(sharing):
    batches = Batches([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]])
    with pytest.raises(ValueError, match="without split_batches"):
        list(BatchSamplerShard(batches, 2, 0, **sharing))


def wrapping_sampler(data, world, rank):
    sampler = DistributedSampler(data, world, rank)
    sampler.sampler = SequentialSampler(data)  # as the DistributedSamplerWrapper that many scripts have copied
    return sampler


@pytest.mark.parametrize("kind", [DistributedSampler, DistributedEvalSampler, wrapping_sampler])
def test_a_distributed_sampler_is_refused_where_it_would_shard_twice(kind):
    # https://github.com/huggingface/accelerate/issues/3520
    with pytest.raises(ValueError, match="twice"):
        played_loaders(2, lambda: DataLoader(Numbers(8), sampler=kind(Numbers(8), 2, 0)))
    for world in (1, 2):
        loaders = played_loaders(world, lambda: DataLoader(Numbers(8), sampler=kind(Numbers(8), 1, 0)))
        assert sorted(gathered(loaders)) == list(range(8))


def stream_with(**attributes):
    stream = Stream(range(8))
    vars(stream).update(attributes)
    return stream


@pytest.mark.parametrize(
    ("stream", "is_named"),
    [
        pytest.param(stream_with(rank=1, world_size=2), True, id="was told"),
        pytest.param(stream_with(_distributed=SimpleNamespace(rank=1, world_size=2)), True, id="datasets"),
        pytest.param(stream_with(dataset=stream_with(rank=1, world_size=2)), True, id="wrapped"),
        pytest.param(stream_with(rank=1, world_size=4), False, id="of another job"),
        pytest.param(Stream(range(8)), False, id="plain"),
    ],
)
def test_a_stream_that_knows_its_rank_is_named_in_a_warning(stream, is_named, caplog):
    # https://github.com/huggingface/accelerate/issues/4199
    prepare_data_loader(DataLoader(stream), num_processes=1, process_index=0)
    assert not caplog.records
    prepare_data_loader(DataLoader(stream), num_processes=2, process_index=1)
    assert [type(stream).__name__ in record.getMessage() for record in caplog.records] == [True] * is_named


@pytest.mark.parametrize("make", [tuple, torch.tensor, numpy.array], ids=["tuples", "tensors", "arrays"])
@pytest.mark.parametrize("split", [True, False])
def test_batches_need_not_be_lists(make, split):
    """The short last batch is filled up. NumPy's + would have added the sample numbers."""
    batches = Batches([make([0, 1, 2, 3]), make([4, 5, 6, 7]), make([8, 9])])
    seen = [[[int(n) for n in batch] for batch in BatchSamplerShard(batches, 2, rank, split)] for rank in (0, 1)]
    if split:
        assert seen == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    else:
        assert seen == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]
