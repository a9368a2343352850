"""A prepared loader reads a batch ahead where the original's does, so both draw the same random numbers in turn."""

import importlib
import itertools
import pickle
import random
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate, get_worker_info

from common.accelerator.utils import listify
from tests.peers import import_or_skip
from tests.states import OURS, THEIRS, forget_states
from tests.toys import Augmented, NumbersOfEpoch, Stream, StreamOfWorkers


class EachGenerator(NumbersOfEpoch):
    """Numbers of an epoch, with draws from all three generators, of which the collator draws one more."""

    def __getitem__(self, index):
        return torch.tensor([super().__getitem__(index), *drawn()], dtype=torch.float64)


def drawn():
    """A number from each generator, as a script's noise and dropout."""
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def mask(samples):
    return [default_collate(samples), random.random()]


class EagerBatches(BatchSampler):
    def __iter__(self):
        order = torch.randperm(9).tolist()
        return iter([order[:4], order[4:8], order[8:]])


class DrawingStream(Stream):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for sample in self.samples:
            yield torch.tensor([sample + 1000 * self.epoch, torch.rand(()).item()])


def take_a_part(worker_id):
    """As in torch's documentation: sets what this worker's copy of the stream yields."""
    stream = get_worker_info().dataset
    getattr(stream, "dataset", stream).samples = range(worker_id, 13, 2)


DATA = EachGenerator(9)
LOADERS = {
    "shuffled": lambda: DataLoader(DATA, 2, shuffle=True, collate_fn=mask),
    "drop_last": lambda: DataLoader(DATA, 2, drop_last=True),
    "one batch": lambda: DataLoader(DATA, 20),
    "empty": lambda: DataLoader(EachGenerator(0), 2),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=EagerBatches(range(9), 4, False)),
    "batch sampler, workers": lambda: DataLoader(DATA, batch_sampler=EagerBatches(range(9), 4, False), num_workers=1),
    "workers": lambda: DataLoader(
        Augmented(9), 2, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(3)
    ),
    "workers that stay": lambda: DataLoader(DATA, 2, shuffle=True, num_workers=1, persistent_workers=True),
    "stream in workers": lambda: DataLoader(StreamOfWorkers(range(13)), 2, num_workers=2),
    "stream in workers that are told": lambda: DataLoader(
        Stream(range(13)), 2, num_workers=2, worker_init_fn=take_a_part
    ),
    "stream": lambda: DataLoader(DrawingStream(range(9)), 2, collate_fn=mask),
    "stream of batches": lambda: DataLoader(DrawingStream(range(9)), batch_size=None),
}


def epochs(library, loader):
    yield from loader
    yield from loader


def set_in_the_loop(library, loader):
    for number, batch in enumerate(loader):
        loader.set_epoch(number)
        yield batch


def skipping(library, loader):
    loader.set_epoch(3)
    yield from library.skip_first_batches(loader, 1)


def left_early(library, loader):
    yield from itertools.islice(loader, 2)
    yield from loader


def looked_at(library, loader):
    for batch in loader:
        yield next(iter(loader), None)
        yield batch


def zipped(library, loader):
    for pair in zip(loader, library.prepare_data_loader(LOADERS["shuffled"]()), strict=False):
        yield from pair


def unprepared(library, loader):
    yield from itertools.islice(loader, 1)
    stream = DrawingStream(range(9))
    stream.set_epoch(3)  # which skipping leaves as it is
    yield from library.skip_first_batches(DataLoader(stream, 2), 1)


def copied(library, loader):
    yield from pickle.loads(pickle.dumps(loader))


LOOPS = [epochs, skipping, left_early, set_in_the_loop, looked_at, zipped, unprepared, copied]
# In so many loops the original crashes: where no step is left to dispatch, and where two processes share ready batches.
CRASHES = {"one batch": 1, "empty": 8, "stream of batches": 16}


class Process(NamedTuple):
    """A process that reads, `rank` of `world`, or with `dispatches` the main one, which reads for all."""

    rank: int
    world: int
    dispatches: bool = False


PROCESSES = [Process(0, 1), Process(0, 2), Process(1, 2), Process(0, 1, dispatches=True)]


def seen(root, make, loop, process):
    """The batches of a loop, with draws of the script beside each, and those that follow."""
    importlib.import_module(f"{root}.state").PartialState(cpu=True)
    library = importlib.import_module(f"{root}.data_loader")
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    how = {"put_on_device": True, "dispatch_batches": process.dispatches}
    try:
        loader = library.prepare_data_loader(make(), torch.device("cpu"), process.world, process.rank, **how)
        return [(listify(batch), drawn()) for batch in loop(library, loader)], drawn()
    finally:
        forget_states()


SLOW = [pytest.param(kind, marks=pytest.mark.slow) if "workers" in kind else kind for kind in LOADERS]


@pytest.mark.parametrize("kind", SLOW)
def test_data_sets_and_collators_draw_in_the_order_of_accelerate(kind):
    import_or_skip("accelerate")
    loops = LOOPS[:3] if "workers" in kind else LOOPS
    crashes = 0
    for loop, process in itertools.product(loops, PROCESSES):
        try:
            original = seen(THEIRS, LOADERS[kind], loop, process)
        except (TypeError, ValueError):
            crashes += 1
            continue
        assert seen(OURS, LOADERS[kind], loop, process) == original, (loop, process)
    assert crashes == CRASHES.get(kind, 0)
