"""Observers of DataLoaders: which samples a rank reads in each pass, and what comes with them."""

import functools
import os
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.doctor.generators import generators
from common.doctor.record import Pass
from common.doctor.watcher import Watcher

PASSES = 64
SAMPLES = 2_000_000  # of a pass
FINGERPRINTS = 4096  # samples of a pass
VALUES = 1024  # of a tensor of a sample, spread over it
DRAWS = 16  # of a pass
EACH_ONCE = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler)  # unless with replacement


class DataWatch:
    """The passes of a script over its DataLoaders.

    A loader asks for the numbers of a batch before it reads it, with workers several batches before. So the numbers
    wait in line until their batch is handed out.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._loaders: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
        self._opened = 0
        self._opening: Pass | None = None
        self._opening_queue: list = []
        self._newest: Pass | None = None  # the one whose batch was handed out last

    def install(self) -> None:
        self._watch_passes()
        self._watch_numbers()
        self._watch_batches()

    def note_forward(self, in_parallel: bool) -> None:
        """A forward in training: of the batch that was handed out last, as far as can be seen."""
        if self._newest is not None:
            self._newest.forwards += 1
            self._newest.in_parallel += in_parallel

    def note_input(self, inputs: Any) -> None:
        """The inputs of a network in training: of the whole batch, or of a part that the script has cut out."""
        first = next(_tensors(inputs), None)
        if self._newest is not None and first is not None and first.dim():
            self._newest.shares += len(first) * int(os.environ["WORLD_SIZE"]) == self._newest.last_batch

    def _watch_passes(self) -> None:
        begin = DataLoader.__iter__
        opened = self._watcher.observer(self._open)
        assigned = self._watcher.observer(self._assign)

        @functools.wraps(begin)
        def noted(loader: DataLoader) -> Iterator:
            opened(loader)
            iterator = begin(loader)
            assigned(iterator)
            return iterator

        DataLoader.__iter__ = noted  # type: ignore

    def _watch_numbers(self) -> None:
        next_index = _BaseDataLoaderIter._next_index
        asked = self._watcher.observer(self._queue)

        @functools.wraps(next_index)
        def noted(iterator: Any) -> Any:
            numbers = next_index(iterator)
            asked(iterator, numbers)
            return numbers

        _BaseDataLoaderIter._next_index = noted  # type: ignore

    def _watch_batches(self) -> None:
        next_batch = _BaseDataLoaderIter.__next__
        before = self._watcher.observer(self._before_batch)
        handed_out = self._watcher.observer(self._after_batch)
        ended = self._watcher.observer(self._end)

        @functools.wraps(next_batch)
        def noted(iterator: Any) -> Any:
            before(iterator)
            try:
                batch = next_batch(iterator)
            except StopIteration:
                ended(iterator)
                raise
            handed_out(iterator, batch)
            return batch

        _BaseDataLoaderIter.__next__ = noted  # type: ignore

    def _open(self, loader: DataLoader) -> None:
        number = self._loaders.setdefault(loader, self._opened)
        self._opened += 1
        plain = type(loader.batch_sampler) in (BatchSampler, type(None))
        replacement = bool(getattr(loader.sampler, "replacement", False))
        self._opening = Pass(
            loader=number,
            size=_size(loader.dataset),
            plain=plain,
            sampler=type(loader.sampler if plain else loader.batch_sampler).__name__,
            each_once=plain and not replacement and type(loader.sampler) in EACH_ONCE,
            replacement=replacement,
        )
        self._opening_queue = []

    def _assign(self, iterator: Any) -> None:
        iterator._doctor_pass = self._opening
        iterator._doctor_queue = self._opening_queue
        self._opening = None

    def _queue(self, iterator: Any, numbers: Any) -> None:
        # A loader with workers asks for the first batches before its iterator is there.
        queue = iterator._doctor_queue if self._opening is None else self._opening_queue
        queue.append(numbers)

    def _before_batch(self, iterator: Any) -> None:
        iterator._doctor_generators = None
        one = iterator._doctor_pass
        # The first batch may bring the draws of the sampler, which are wanted to be equal.
        if iterator._num_workers == 0 and one.batches > 0 and len(one.draws) < DRAWS:
            iterator._doctor_generators = generators()

    def _after_batch(self, iterator: Any, batch: Any) -> None:
        one: Pass = iterator._doctor_pass
        record = self._watcher.record
        if one.batches == 0 and len(record.passes) < PASSES:
            record.passes.append(one)
        self._newest = one
        one.batches += 1
        if iterator._doctor_generators is not None:
            one.draws.append((iterator._doctor_generators, generators()))
        numbers = iterator._doctor_queue.pop(0) if iterator._doctor_queue else None
        samples = _samples(numbers, iterator._dataset)
        count = _count(batch) if samples is None else len(samples)
        if one.read == len(one.contents) < FINGERPRINTS:
            rows = _contents(batch, count)
            if rows and (not one.contents or len(rows[0]) == len(one.contents[0])):
                one.contents.extend(rows)
        one.read += count
        one.last_batch = count
        if samples is None or one.samples is None or len(one.samples) > SAMPLES:
            one.samples = None
            return
        one.samples.extend(samples)

    def _end(self, iterator: Any) -> None:
        iterator._doctor_pass.complete = True
        self._watcher.keep()


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


def _count(batch: Any) -> int:
    """The samples of a batch without numbers: as many as its first tensor has rows."""
    tensor = next((tensor for tensor in _tensors(batch) if tensor.dim()), None)
    return 0 if tensor is None else len(tensor)


def _contents(batch: Any, samples: int) -> list[list[int]]:
    """For each sample a fingerprint of each of its tensors: labels stay where images are augmented.

    What fills texts up to the length of a batch's longest one is left out: it differs from batch to batch.
    """
    contents: list[list[int]] = [[] for _ in range(samples)]
    for tensor in _tensors(batch):
        if tensor.dim() == 0 or len(tensor) != samples:
            continue
        rows = tensor.detach().reshape(samples, -1)
        stride = max(1, rows.shape[1] // VALUES)
        spread = rows[:, ::stride][:, :VALUES]
        values = spread.cpu().contiguous()
        filling = _filling(values).long()
        leading = filling.cumprod(1).sum(1)
        trailing = filling.flip(1).cumprod(1).sum(1)
        if values.is_floating_point():
            leading.zero_()  # one-hot rows without the zeros on both sides would all be alike
        begins = leading.tolist()
        ends = (values.shape[1] - trailing).tolist()
        for content, row, begin, end in zip(contents, values.view(torch.uint8).numpy(), begins, ends, strict=True):
            content.append(zlib.crc32(row[begin * values.itemsize : end * values.itemsize]))
    return contents


def _filling(rows: Tensor) -> Tensor:
    """Where a value stands that may fill rows up: 0, and, among whole numbers, one that ends a row at least twice."""
    filling = rows == 0
    if rows.is_floating_point() or rows.shape[1] < 2:
        return filling
    ends_twice = rows[:, -1] == rows[:, -2]
    return filling | torch.isin(rows, rows[ends_twice, -1])


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif hasattr(batch, "values"):  # a dict, or what a tokenizer returns
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)
