"""Observers of DataLoaders: which samples a rank reads in each epoch, and what comes with them."""

import os
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.doctor.generators import note_draws, states
from common.doctor.record import Epoch
from common.doctor.watcher import Watcher

EPOCHS = 64
FINGERPRINTS = 4096  # samples of an epoch
VALUES = 1024  # of a tensor of a sample, spread over it
DRAWS = 16  # batches of an epoch before and after which the generators are looked at


@dataclass
class Reading:
    """An epoch that is being read; the loader's iterator has it as an attribute.

    A loader asks for the numbers of a batch before it reads it, with workers several batches before. So the numbers
    wait in `asked` until their batch is handed out.
    """

    epoch: Epoch
    asked: deque = field(default_factory=deque)
    generators: dict[str, int] | None = None  # the states of the random generators before the batch that is read now


class DataWatch:
    """The epochs of a script over its DataLoaders."""

    def __init__(self, watcher: Watcher) -> None:
        self._record = watcher.record
        self._newest: Epoch | None = None  # the one whose batch was handed out last

    def note_forward(self, inputs: Any) -> None:
        """A forward in training: of the batch that was handed out last, as far as can be seen, or of a part of it."""
        epoch = self._newest
        if epoch is None:
            return
        epoch.forwards += 1
        rows = next((len(tensor) for tensor in _tensors(inputs)), 0)
        if rows * int(os.environ["WORLD_SIZE"]) == epoch.last_batch:
            epoch.shares += 1

    def open(self, _: None, iterator: Any, loader: DataLoader, *args: Any) -> None:
        plain = type(loader.batch_sampler) in (BatchSampler, type(None))
        iterator._doctor = Reading(Epoch(id(loader), _size(loader.dataset), plain))

    def queue(self, numbers: Any, iterator: Any) -> None:
        iterator._doctor.asked.append(numbers)

    def before_batch(self, iterator: Any) -> None:
        reading: Reading = iterator._doctor
        reading.epoch.complete = True  # unless a batch comes
        reading.generators = None
        # The first batch may bring the draws of the sampler, which are wanted to be equal.
        if iterator._num_workers == 0 and 0 < reading.epoch.batches <= DRAWS:
            reading.generators = states()

    def after_batch(self, batch: Any, iterator: Any) -> None:
        reading: Reading = iterator._doctor
        epoch = reading.epoch
        if epoch.batches == 0 and len(self._record.epochs) < EPOCHS:
            self._record.epochs.append(epoch)
        self._newest = epoch
        epoch.complete = False
        epoch.batches += 1
        if reading.generators is not None:
            note_draws(self._record.batch_draws, reading.generators)
        samples = _samples(reading.asked.popleft(), iterator._dataset)
        if samples is None:
            epoch.samples = None
        elif epoch.samples is not None:
            epoch.samples += samples
            epoch.last_batch = len(samples)
        if len(epoch.contents) < FINGERPRINTS:
            epoch.contents += contents(batch)


def install(watcher: Watcher) -> DataWatch:
    data = DataWatch(watcher)
    # An iterator that keeps its workers is reset for another epoch.
    watcher.watch(_BaseDataLoaderIter, "__init__", after=data.open)
    watcher.watch(_BaseDataLoaderIter, "_reset", after=data.open)
    watcher.watch(_BaseDataLoaderIter, "_next_index", after=data.queue)
    watcher.watch(_BaseDataLoaderIter, "__next__", before=data.before_batch, after=data.after_batch)
    return data


def _size(dataset: Any) -> int | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    try:
        return len(dataset)
    except TypeError:  # an iterable data set
        return None


def _samples(numbers: Any, dataset: Any) -> list[int] | None:
    """The numbers of a batch in the whole data set; None where a data set has none."""
    if not isinstance(numbers, list | tuple):
        numbers = [numbers]
    try:
        samples = [int(number) for number in numbers]
    except (TypeError, ValueError):
        return None
    while isinstance(dataset, Subset):
        samples = [int(dataset.indices[sample]) for sample in samples]
        dataset = dataset.dataset
    return samples


def contents(batch: Any) -> list[tuple[int, ...]]:
    """For each sample a fingerprint of each of its tensors: labels stay where images are augmented."""
    columns: list[list[int]] = []
    for tensor in _tensors(batch):
        if columns and len(tensor) != len(columns[0]):
            continue  # it is of the batch, and not of its samples
        rows = tensor.detach().reshape(len(tensor), -1)
        stride = max(1, rows.shape[1] // VALUES)
        spread = rows[:, ::stride].cpu()
        columns.append([_fingerprint(row) for row in spread])
    return list(zip(*columns, strict=True))


def _fingerprint(row: Tensor) -> int:
    values = row
    if len(row) > 1 and not row.is_floating_point():
        values = row[row > 0]  # without the 0 or -100 that fill up a text in a batch of longer ones
    raw_bytes = values.contiguous().view(torch.uint8)
    return zlib.crc32(raw_bytes.numpy().tobytes())


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch that have rows."""
    if isinstance(batch, Tensor) and batch.dim():
        yield batch
    elif hasattr(batch, "items"):  # a dict, or what a tokenizer returns
        for _, part in batch.items():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)
