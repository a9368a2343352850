"""Samples: how ranks read them in epochs and evaluations, and what is noted of the loaders that hand them out."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from common.doctor.checks import samples
from common.doctor.checks.contents import contents_of, count_samples
from common.doctor.checks.loaders import LoaderObserver
from common.doctor.record import Record
from common.doctor.results import Finding, Passed, Skipped
from tests.unit.doctor.records import epoch_of


def shuffled(seed: int) -> list[int]:
    return torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).tolist()


PARTS = [[shuffled(epoch)[rank::2] for rank in range(2)] for epoch in range(4)]  # four epochs of two ranks
# The contents of a sample, an image and a label, by the rank and the epoch that read it.
CONTENTS = {
    "same": lambda rank, epoch, sample: (sample, sample % 20 == 0),
    "of each rank": lambda rank, epoch, sample: (1000 * rank + sample, sample % 20 == rank),
    "augmented": lambda rank, epoch, sample: (9000 * rank + 1000 * epoch + sample, sample % 7),
    "new": lambda rank, epoch, sample: (9000 * rank + 1000 * epoch + sample, (sample + rank + epoch) % 7),
}


def ranks_that_read(*epochs: list[list[int]], contents: str = "same") -> list[Record]:
    """The records of ranks: an epoch has a list of samples for each of them."""
    records = [Record(rank) for rank in range(len(epochs[0]))]
    for number, orders in enumerate(epochs):
        for one, order in zip(records, orders, strict=True):
            one.epochs.append(epoch_of(order, functools.partial(CONTENTS[contents], one.rank, number)))
    return records


@pytest.mark.parametrize(
    "contents, verdict_on_datasets",
    [("same", Passed), ("augmented", Passed), ("new", Skipped), ("of each rank", Finding)],
)
def test_parts_of_one_order_are_right_and_show_if_the_datasets_are_alike(contents, verdict_on_datasets):
    records = ranks_that_read(*PARTS, contents=contents)
    assert samples.check_training_samples(records) == Passed()
    assert isinstance(samples.check_datasets(records), verdict_on_datasets)
    records[0].epochs[0].available = range(9000)  # of which few were read, so that none was read twice by chance
    assert samples.check_training_samples(records) != Passed()


@pytest.mark.parametrize(
    "of_ranks, contents, kind, pitfall",
    [
        pytest.param([shuffled(0), shuffled(0)], "same", Finding, None, id="all in one order"),
        pytest.param([shuffled(0), shuffled(1)], "same", Finding, "different_orders", id="all in an order of its own"),
        pytest.param([shuffled(0), shuffled(1)], "of each rank", Skipped, None, id="data of its own"),
        pytest.param([shuffled(0)[rank % 2 :: 2] for rank in range(4)], "same", Skipped, None, id="two of four parts"),
        pytest.param([2 * shuffled(0), 2 * shuffled(1)], "same", Skipped, None, id="with replacement"),
    ],
)
def test_samples_are_read_twice_by_mistake_or_for_a_reason(of_ranks, contents, kind, pitfall):
    records = ranks_that_read(of_ranks, contents=contents)
    result = samples.check_training_samples(records)
    assert (type(result), getattr(result, "pitfall", None)) == (kind, pitfall)
    assert isinstance(samples.check_datasets(records), Skipped)


def test_datasets_are_compared_where_their_numbers_were_dealt_out():
    records = ranks_that_read(*[[shuffled(0), shuffled(1)]] * 2, contents="of each rank")
    for one in records:
        one.epochs += [epoch_of(parts[one.rank], dataset=1) for parts in PARTS]
    assert samples.check_datasets(records) == Passed()


@pytest.mark.parametrize("seeds, kind", [((0, 0), Finding), ((0, 1), Passed)])
def test_two_datasets_that_are_read_in_turn_are_shuffled_anew_each(seeds, kind):
    epochs = [epoch_of(shuffled(seed), dataset=dataset) for seed in seeds for dataset in range(2)]
    dry_run = epoch_of(shuffled(0)[:16], batch_size=16)
    assert isinstance(samples.check_orders([Record(0, epochs=[dry_run, *epochs, dry_run])]), kind)


@pytest.mark.parametrize("forwards", [[], [2, 2], [0]])
def test_who_reads_all_samples_may_train_on_every_other_batch_or_on_a_part_of_it(forwards):
    records = ranks_that_read([shuffled(0), shuffled(0)])
    for batch in records[1].epochs[0].batches[::2]:
        batch.forwards = forwards
    assert isinstance(samples.check_training_samples(records), Skipped)


@pytest.mark.parametrize(
    "of_rank_0, of_rank_1, kind",
    [
        pytest.param([0, 2, 4], [1, 3, 5], Passed, id="each once"),
        pytest.param([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], Passed, id="all on each rank"),
        pytest.param([0, 2, 4], [5, 1, 3, 0], Finding, id="filled up"),
        pytest.param([0, 2, 4], [5, 1, 3, 5], Skipped, id="filled up by its own"),
        pytest.param([0, 2, 4], [2, 5, 1, 3], Skipped, id="no padding"),
        pytest.param([0, 1, 2, 3], [0, 1, 2, 3], Skipped, id="dropped on each rank"),
    ],
)
def test_evaluations_are_compared_as_the_table_of_the_check_says(of_rank_0, of_rank_1, kind):
    epochs = [epoch_of(order, batch_size=1, length=6, trained=False) for order in (of_rank_0, of_rank_1)]
    records = [Record(rank, epochs=[epoch]) for rank, epoch in enumerate(epochs)]
    result = samples.check_evaluation_samples(records)
    assert isinstance(result, kind)
    assert kind is not Finding or result.text.startswith("1 of 6 samples are")
    records[0].epochs *= 2  # a further one
    assert isinstance(samples.check_evaluation_samples(records), Skipped)
    records[0].epochs[1] = epoch_of(range(8))  # the data are trained on too
    assert isinstance(samples.check_evaluation_samples(records), Skipped)
    for epoch in records[0].epochs + records[1].epochs:
        epoch.batches[-1].steps = 1  # as in a training that reads two loaders at once
    assert isinstance(samples.check_evaluation_samples(records), Skipped)


def test_samples_that_are_not_stacked_have_contents_too():
    images_and_boxes = [(torch.ones(3, 8), torch.ones(4)), (torch.ones(3, 9), torch.ones(5))]
    assert len(set(contents_of(tuple(zip(*images_and_boxes, strict=True)), 2))) == 2
    assert contents_of([image for image, _ in images_and_boxes], 2) == contents_of(torch.eye(2).to_sparse(), 2) == []
    assert count_samples(([torch.ones(3, 8, 8)] * 2,), {}) == count_samples((), {"x": torch.ones(2, 3)}) == 2
    assert len(contents_of(torch.ones(2, 3, dtype=torch.complex64).conj(), 2)) == 2
    with_a_field_items = type("Named", (tuple,), {"items": None})
    assert len(contents_of(with_a_field_items([torch.ones(2, 3)]), 2)) == 2


@pytest.mark.parametrize(
    "dataset, order, kind",
    [
        (range(40), range(39, -1, -1), Finding),
        (Subset(range(40), range(39, -1, -1)), range(30), Skipped),  # as random_split has made it
        (range(41), [*range(1, 41, 2), 0], Skipped),  # filled up
    ],
)
def test_epochs_are_alike_by_mistake_if_they_are_shuffled(dataset, order, kind, recorder):
    LoaderObserver(recorder).install()
    loader = DataLoader(dataset, batch_sampler=torch.tensor(order).split(4))
    for _ in range(2):
        list(loader)
    for epoch in recorder.record.epochs:
        epoch.batches[0].forwards.append(4)
        epoch.batches[-1].steps = 1
    assert isinstance(samples.check_orders([recorder.record]), kind)


def test_loaders_of_one_data_set_read_the_same_and_those_of_others_do_not(recorder):
    LoaderObserver(recorder).install()
    for number in range(12):
        data = range(4 + number)  # a new one, which nothing else holds
        list(DataLoader(data))
        list(DataLoader(data))
    assert len({epoch.dataset for epoch in recorder.record.epochs}) == 12
    list(DataLoader(range(4), num_workers=1, in_order=False))
    assert [batch.indices for batch in recorder.record.epochs[-1].batches] == [[]] * 4


def test_a_forward_is_with_the_newest_batch_while_its_loader_is_read(recorder):
    observer = LoaderObserver(recorder)
    observer.install()
    iterator = iter(DataLoader(Subset(range(9), [4, 99, 8])))
    next(iterator)
    with pytest.raises(IndexError):  # the script reads on
        next(iterator)
    next(iterator)
    assert observer.batch_in_use().indices == [8]
    del iterator  # `break`, or the end
    assert observer.batch_in_use() is None
    list(ThreadPoolExecutor().submit(iter, DataLoader(range(2))).result())  # of another thread: unseen, and no error
