"""DataLoaders: the samples of each epoch.

The observer wraps methods of the private class of a DataLoader's iterators, because torch has no hook for them.
"""

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.doctor.observers.contents import contents, tensors_in
from common.doctor.observers.generators import note_draws, states
from common.doctor.observers.recorder import Recorder
from common.doctor.record import Batch, Epoch

CPU = torch.device("cpu")  # batches are read there
MAX_EPOCHS = 64
MAX_FINGERPRINTS = 4096  # the samples of an epoch that get one


@dataclass
class Reading:
    """An epoch that is being read.

    A loader asks for the numbers of a batch before it reads it, with workers several batches before. So the numbers
    wait in `asked` until their batch is handed out.
    """

    epoch: Epoch
    asked: deque = field(default_factory=deque)
    fingerprints: int = 0  # the number of samples that have got one
    generators: dict[str, int] = field(default_factory=dict)  # the states before the batch that is read now


class LoaderObserver:
    """The epochs of a script over its DataLoaders.

    For each batch of a DataLoader without workers these are called, one after the other:

        before_batch   the states of the random generators are recorded
        after_indices  the numbers of the batch are put into `asked`
        after_batch    the numbers move from `asked` to a new Batch
        note_forward   a forward in training is noted in the Batch; note_evaluation notes any other one
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._record = recorder.record
        self._readings: weakref.WeakKeyDictionary[Any, Reading] = weakref.WeakKeyDictionary()  # that of each iterator
        self._newest = Batch([], [])  # the batch that was handed out last; before the first one, a batch of no epoch

    def install(self) -> None:
        self._recorder.wrap(_BaseDataLoaderIter, "__init__", after=self.after_start)
        # An iterator that keeps its workers is reset for another epoch.
        self._recorder.wrap(_BaseDataLoaderIter, "_reset", after=self.after_start)
        self._recorder.wrap(_BaseDataLoaderIter, "_next_index", after=self.after_indices)
        self._recorder.wrap(_BaseDataLoaderIter, "__next__", self.before_batch, self.after_batch, self.after_error)

    def note_forward(self, inputs: Any) -> None:
        """Note a forward in training, with these inputs, in the newest batch."""
        self._newest.forwards.append(len(next(tensors_in(inputs), ())))

    def note_evaluation(self) -> None:
        self._newest.evaluated = True

    def after_start(self, _: None, iterator: Any, loader: DataLoader, *args: Any) -> None:
        self._readings[iterator] = Reading(Epoch(id(loader), _size(loader.dataset)))

    def after_indices(self, numbers: Any, iterator: Any) -> None:
        self._readings[iterator].asked.append(numbers)

    def before_batch(self, iterator: Any) -> None:
        reading = self._readings[iterator]
        # The first batch includes the sampler's own draws, and those should be equal on all ranks. Workers draw in
        # processes of their own.
        if reading.epoch.batches and iterator._num_workers == 0:
            reading.generators = states(CPU)

    def after_batch(self, batch: Any, iterator: Any) -> None:
        reading = self._readings[iterator]
        note_draws(self._record, "batches", reading.generators, CPU)
        epoch = reading.epoch
        if not epoch.batches and len(self._record.epochs) < MAX_EPOCHS:
            self._record.epochs.append(epoch)
        samples = _samples(reading.asked.popleft(), iterator._dataset)
        found = contents(batch) if reading.fingerprints < MAX_FINGERPRINTS else []
        reading.fingerprints += len(found)
        self._newest = Batch(samples, found, len(self._record.steps), len(self._record.collectives))
        epoch.batches.append(self._newest)

    def after_error(self, error: BaseException, iterator: Any) -> None:
        if isinstance(error, StopIteration):
            self._readings[iterator].epoch.complete = True


def _size(dataset: Any) -> int | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    try:
        return len(dataset)
    except TypeError:  # an iterable data set
        return None


def _samples(numbers: Any, dataset: Any) -> list[int]:
    """The numbers of a batch in the whole data set; empty where a data set has none."""
    if not isinstance(numbers, list | tuple):
        numbers = [numbers]
    try:
        samples = [int(number) for number in numbers]
    except (TypeError, ValueError):
        return []
    while isinstance(dataset, Subset):
        samples = [int(dataset.indices[sample]) for sample in samples]
        dataset = dataset.dataset
    return samples
