"""Observers of DataLoaders: which samples a rank reads in each pass, and what comes with them."""

import functools
import os
import random
import sys
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

from common.doctor.record import Generators, Pass
from common.doctor.watcher import Watcher

PASSES = 64
FINGERPRINTS = 4096  # samples of a pass
VALUES = 1024  # of a tensor of a sample, spread over it
DRAWS = 16  # of a pass
EACH_ONCE = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler)  # unless with replacement


class DataWatch:
    """The passes of a script over its DataLoaders.

    A loader asks for the numbers of a batch before it reads it, with workers several batches before. So the numbers
    wait in line until their batch is handed out. Pass and line are attributes of the loader's iterator.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._loaders: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
        self._opened = 0
        self._newest: Pass | None = None  # the one whose batch was handed out last

    def install(self) -> None:
        # An iterator that keeps its workers is reset for another pass.
        self._watcher.after(_BaseDataLoaderIter, "__init__", self._open)
        self._watcher.after(_BaseDataLoaderIter, "_reset", self._open)
        self._watcher.after(_BaseDataLoaderIter, "_next_index", self._queue)
        self._watcher.before(_BaseDataLoaderIter, "__next__", self._before_batch)
        self._watcher.after(_BaseDataLoaderIter, "__next__", self._after_batch)
        next_batch = _BaseDataLoaderIter.__next__
        ended = self._watcher.observer(self._end)

        @functools.wraps(next_batch)
        def noted(iterator: Any) -> Any:
            try:
                return next_batch(iterator)
            except StopIteration:
                ended(iterator)
                raise

        _BaseDataLoaderIter.__next__ = noted  # type: ignore

    def note_forward(self, in_parallel: bool) -> None:
        """A forward in training: of the batch that was handed out last, as far as can be seen."""
        if self._newest is not None:
            self._newest.forwards += 1
            self._newest.in_parallel += in_parallel

    def note_input(self, inputs: Any) -> None:
        """The inputs of a network in training: of the whole batch, or of a part that the script has cut out."""
        if self._newest is not None:
            share = _rows(inputs) * int(os.environ["WORLD_SIZE"])
            self._newest.shares += share == self._newest.last_batch

    def _open(self, _: None, iterator: Any, loader: DataLoader, *args: Any) -> None:
        number = self._loaders.setdefault(loader, self._opened)
        self._opened += 1
        plain = type(loader.batch_sampler) in (BatchSampler, type(None))
        replacement = getattr(loader.sampler, "replacement", False)
        iterator._doctor_pass = Pass(
            loader=number,
            size=_size(loader.dataset),
            plain=plain,
            each_once=plain and not replacement and type(loader.sampler) in EACH_ONCE,
        )
        iterator._doctor_queue = []

    def _queue(self, numbers: Any, iterator: Any) -> None:
        iterator._doctor_queue.append(numbers)

    def _before_batch(self, iterator: Any) -> None:
        iterator._doctor_generators = None
        one = iterator._doctor_pass
        # The first batch may bring the draws of the sampler, which are wanted to be equal.
        if iterator._num_workers == 0 and one.batches > 0 and len(one.draws) < DRAWS:
            iterator._doctor_generators = generators()

    def _after_batch(self, batch: Any, iterator: Any) -> None:
        one: Pass = iterator._doctor_pass
        passes = self._watcher.record.passes
        if one.batches == 0 and len(passes) < PASSES:
            passes.append(one)
        self._newest = one
        one.batches += 1
        if iterator._doctor_generators is not None:
            one.draws.append((iterator._doctor_generators, generators()))
        numbers = iterator._doctor_queue.pop(0) if iterator._doctor_queue else None
        samples = _samples(numbers, iterator._dataset)
        one.last_batch = _rows(batch) if samples is None else len(samples)
        if one.read == len(one.contents) < FINGERPRINTS:
            one.contents += _contents(batch, one.last_batch)
        one.read += one.last_batch
        if samples is None:
            one.samples = None
        elif one.samples is not None:
            one.samples += samples

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


def _rows(batch: Any) -> int:
    """The samples of a batch without numbers: as many as its first tensor has rows."""
    for tensor in _tensors(batch):
        if tensor.dim():
            return len(tensor)
    return 0


def _contents(batch: Any, samples: int) -> list[tuple[int, ...]]:
    """For each sample a fingerprint of each of its tensors: labels stay where images are augmented."""
    columns = []
    for tensor in _tensors(batch):
        if tensor.dim() and len(tensor) == samples:
            rows = tensor.detach().reshape(samples, -1)
            stride = max(1, rows.shape[1] // VALUES)
            spread = rows[:, ::stride][:, :VALUES]
            columns.append([_fingerprint(row) for row in spread.cpu()])
    return list(zip(*columns, strict=True))


def _fingerprint(row: Tensor) -> int:
    """A number for these values, without those that fill a text up: how many there are differs from batch to batch."""
    if len(row) > 1 and not row.is_floating_point():
        for first, second in (row[:2].tolist(), row[-2:].tolist()):
            if first == second:
                row = row[row != first]
        row = row[row != 0]
    return zlib.crc32(row.contiguous().view(torch.uint8).numpy().tobytes())


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif hasattr(batch, "values"):  # a dict, or what a tokenizer returns
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors(part)


def generators(device: torch.device | None = None) -> Generators:
    """A fingerprint of the state of each default generator, of torch, Python, NumPy and, if it is one, of the GPU.

    Equal states draw equal numbers.
    """
    states = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "python": hash(random.getstate()[1]),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)["state"]
        states["numpy"] = zlib.crc32(state["key"], state["pos"])
    if device is not None and device.type == "cuda":
        states["cuda"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states
