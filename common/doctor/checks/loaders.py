"""The observer of DataLoaders: it notes epochs, batches and their samples, which `samples` judges."""

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.doctor.checks.contents import contents_of
from common.doctor.checks.random_numbers import note_draws, states
from common.doctor.record import Batch, Epoch
from common.doctor.recorder import Recorder

MAX_EPOCHS = 64
MAX_FINGERPRINTS = 4096  # the samples of an epoch whose contents are noted


@dataclass
class Reading:
    """An epoch that is being read. A loader with workers asks for the indices of several batches ahead."""

    epoch: Epoch
    iterator: weakref.ref  # it goes when the script leaves its loop
    asked: deque = field(default_factory=deque)  # the indices of the batches that are not yet handed out
    fingerprints: int = 0  # the number of samples that have got one
    generators: dict[str, int] = field(default_factory=dict)  # the states before the batch that is read now


class LoaderObserver:
    """The epochs of a script, by what its iterators call.

    __init__     an epoch begins
    _reset       an epoch begins, with workers: right after __init__, and again if the iterator keeps its workers
    _next_index  the sampler gives the indices of a batch: with workers for several batches ahead, else in __next__
    __next__     a batch is handed out, or the data end, or an error is raised
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._readings: weakref.WeakKeyDictionary[Any, Reading] = weakref.WeakKeyDictionary()  # that of each iterator
        self._datasets: dict[int, Any] = {}  # of recorded epochs, kept so that no other object gets their `id`
        self._newest: Reading | None = None  # the one that has handed out a batch last

    def install(self) -> None:
        self._recorder.wrap(_BaseDataLoaderIter, "__init__", after=self.after_start)
        self._recorder.wrap(_BaseDataLoaderIter, "_reset", after=self.after_start)
        self._recorder.wrap(_BaseDataLoaderIter, "_next_index", after=self.after_indices)
        self._recorder.wrap(_BaseDataLoaderIter, "__next__", after=self.after_batch, failed=self.after_error)

    def batch_in_use(self) -> Batch | None:
        """The batch for which a forward counts: the newest one, while the script reads its loader (see `Batch`)."""
        if self._newest is None or self._newest.iterator() is None or self._newest.epoch.complete:
            return None
        return self._newest.epoch.batches[-1]

    def after_start(self, _: None, iterator: Any, loader: DataLoader, *args: Any) -> None:
        self._readings[iterator] = Reading(_epoch(loader), weakref.ref(iterator))

    def after_indices(self, indices: Any, iterator: Any) -> None:
        reading = self._readings.get(iterator)
        if reading is None:  # another thread has made it
            return
        reading.asked.append(indices)
        # Samplers and streams should draw the same on all ranks, and the first batch may draw for the dataset once.
        is_stream = isinstance(iterator._dataset, IterableDataset)
        if reading.epoch.batches and iterator._num_workers == 0 and not is_stream:
            reading.generators = states(torch.device("cpu"))

    def after_batch(self, batch: Any, iterator: Any) -> None:
        reading = self._readings.get(iterator)
        if reading is None:
            return
        note_draws(self._recorder.record, "batches", reading.generators, torch.device("cpu"))
        epoch = reading.epoch
        indices = _indices(reading.asked.popleft(), iterator._dataset, epoch)
        if not getattr(iterator, "_in_order", True):  # workers hand out the batches as they are ready
            indices = []
        noted = Batch(indices, [], len(self._recorder.record.steps))
        epoch.batches.append(noted)
        if len(epoch.batches) == 1 and len(self._recorder.record.epochs) < MAX_EPOCHS:
            self._recorder.record.epochs.append(epoch)
            self._datasets[epoch.dataset] = iterator._dataset
        self._newest = reading
        if reading.fingerprints < MAX_FINGERPRINTS:
            noted.contents = contents_of(batch, len(indices))
        reading.fingerprints += len(noted.contents)

    def after_error(self, error: BaseException, iterator: Any) -> None:
        reading = self._readings.get(iterator)
        if reading and isinstance(error, StopIteration):
            reading.epoch.complete = True
        elif reading and reading.asked:  # the script may read on, behind the batch that has failed
            reading.asked.popleft()


def _epoch(loader: DataLoader) -> Epoch:
    epoch = Epoch(id(loader.dataset), dataset_length=None)
    dataset: Any = loader.dataset
    with contextlib.suppress(Exception):  # an iterable dataset has no length, and the script's own may raise anything
        epoch.available = range(len(dataset))
        while isinstance(dataset, Subset):
            epoch.available = [int(dataset.indices[index]) for index in epoch.available]
            dataset = dataset.dataset
        epoch.dataset_length = len(dataset)
    return epoch


def _indices(asked: Any, dataset: Any, epoch: Epoch) -> list[int]:
    """The indices of a batch in the whole dataset; empty where it has none."""
    asked = asked.tolist() if hasattr(asked, "tolist") else asked  # a sampler may give tensors or arrays
    asked = asked if isinstance(asked, list | tuple) else [asked]
    try:
        indices = [int(index) for index in asked]
    except (TypeError, ValueError):
        return []
    return [epoch.available[index] for index in indices] if isinstance(dataset, Subset) else indices
