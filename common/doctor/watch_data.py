"""Observers of DataLoaders: which samples a rank reads in each pass, and what comes with them."""

import os
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.doctor.generators import note_draws, states
from common.doctor.record import Pass
from common.doctor.watcher import Watcher

PASSES = 64
FINGERPRINTS = 4096  # samples of a pass
VALUES = 1024  # of a tensor of a sample, spread over it
DRAWS = 16  # batches of a pass before and after which the generators are looked at


class DataWatch:
    """The passes of a script over its DataLoaders.

    A loader asks for the numbers of a batch before it reads it, with workers several batches before. So the numbers
    wait in line until their batch is handed out. Pass and line are attributes of the loader's iterator.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._newest: Pass | None = None  # the one whose batch was handed out last

    def install(self) -> None:
        watch = self._watcher.watch
        # An iterator that keeps its workers is reset for another pass.
        watch(_BaseDataLoaderIter, "__init__", after=self._open)
        watch(_BaseDataLoaderIter, "_reset", after=self._open)
        watch(_BaseDataLoaderIter, "_next_index", after=self._queue)
        watch(_BaseDataLoaderIter, "__next__", before=self._before_batch, after=self._after_batch)

    def note_forward(self, inputs: Any) -> None:
        """A forward in training: of the batch that was handed out last, as far as can be seen, or of a part of it."""
        if self._newest is not None:
            self._newest.forwards += 1
            rows = next((len(tensor) for tensor in _tensors(inputs)), 0)
            self._newest.shares += rows * int(os.environ["WORLD_SIZE"]) == self._newest.last_batch

    def _open(self, _: None, iterator: Any, loader: DataLoader, *args: Any) -> None:
        iterator._doctor_pass = Pass(
            loader=id(loader),
            size=_size(loader.dataset),
            plain=type(loader.batch_sampler) in (BatchSampler, type(None)),
        )
        iterator._doctor_queue = []

    def _queue(self, numbers: Any, iterator: Any) -> None:
        iterator._doctor_queue.append(numbers)

    def _before_batch(self, iterator: Any) -> None:
        iterator._doctor_generators = None
        one: Pass = iterator._doctor_pass
        one.asked += 1
        # The first batch may bring the draws of the sampler, which are wanted to be equal.
        if iterator._num_workers == 0 and 0 < one.batches <= DRAWS:
            iterator._doctor_generators = states()

    def _after_batch(self, batch: Any, iterator: Any) -> None:
        one: Pass = iterator._doctor_pass
        record = self._watcher.record
        if one.batches == 0 and len(record.passes) < PASSES:
            record.passes.append(one)
        self._newest = one
        one.batches += 1
        if iterator._doctor_generators is not None:
            note_draws(record.batch_draws, iterator._doctor_generators)
        samples = _samples(iterator._doctor_queue.pop(0), iterator._dataset)
        if samples is None:
            one.samples = None
        elif one.samples is not None:
            one.samples += samples
            one.last_batch = len(samples)
        if len(one.contents) < FINGERPRINTS:
            one.contents += contents(batch)


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
        if not columns or len(tensor) == len(columns[0]):
            rows = tensor.detach().reshape(len(tensor), -1)
            stride = max(1, rows.shape[1] // VALUES)
            column = []
            for row in rows[:, ::stride].cpu():
                values = row
                if len(row) > 1 and not row.is_floating_point():
                    values = row[row > 0]  # a text is filled up, as far as the longest of its batch wants it
                column.append(zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes()))
            columns.append(column)
    return list(zip(*columns, strict=True))


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
