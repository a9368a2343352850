"""What is noted of DataLoaders: their epochs and batches, and the order of the samples."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from common.doctor.checks import samples
from common.doctor.checks.loaders import LoaderObserver
from common.doctor.results import Finding, Skipped


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
