"""DataLoaders: each epoch of a training has an order of its own, and in evaluation each sample counts once.

The observers wrap methods of the private class of a DataLoader's iterators, because torch has no hook for them.
"""

import os
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.random_numbers import note_draws, states
from common.doctor.record import Epoch, Record, across_ranks
from common.doctor.recorder import Recorder

CPU = torch.device("cpu")  # reads the batches
MAX_EPOCHS = 64
MAX_FINGERPRINTS = 4096  # samples of an epoch
VALUES_PER_TENSOR = 1024  # of a sample, spread over it
BATCHES_WATCHED = 16  # of an epoch, before and after which the generators are looked at
MIN_SAMPLES = 16  # that have something in common; of fewer it may be chance


@dataclass
class Reading:
    """An epoch that is being read.

    A loader asks for the numbers of a batch before it reads it, with workers several batches before. So the numbers
    wait in `asked` until their batch is handed out.
    """

    epoch: Epoch
    asked: deque = field(default_factory=deque)
    generators: dict[str, int] | None = None  # the states of the random generators before the batch that is read now


class DataWatch:
    """The epochs of a script over its DataLoaders."""

    def __init__(self, recorder: Recorder) -> None:
        self._record = recorder.record
        self._readings: weakref.WeakKeyDictionary[Any, Reading] = weakref.WeakKeyDictionary()  # by iterator
        self._newest: Epoch | None = None  # the one whose batch was handed out last

    def note_forward(self, inputs: Any) -> None:
        """A forward in training: of the batch that was handed out last, as far as can be seen, or of a part of it."""
        epoch = self._newest
        if epoch is None:
            return
        epoch.forwards += 1
        if _is_own_share(inputs, epoch.last_batch):
            epoch.shares += 1

    def on_iterator_made(self, _: None, iterator: Any, loader: DataLoader, *args: Any) -> None:
        by_torch = type(loader.batch_sampler) in (BatchSampler, type(None))
        self._readings[iterator] = Reading(Epoch(id(loader), _size(loader.dataset), by_torch))

    def on_indices_drawn(self, numbers: Any, iterator: Any) -> None:
        self._readings[iterator].asked.append(numbers)

    def before_batch(self, iterator: Any) -> None:
        reading = self._readings[iterator]
        reading.generators = None
        # The first batch may bring the draws of the sampler, which are wanted to be equal.
        if iterator._num_workers == 0 and 0 < reading.epoch.batches <= BATCHES_WATCHED:
            reading.generators = states(CPU)

    def after_batch(self, batch: Any, iterator: Any) -> None:
        reading = self._readings[iterator]
        epoch = reading.epoch
        if epoch.batches == 0 and len(self._record.epochs) < MAX_EPOCHS:
            self._record.epochs.append(epoch)
        self._newest = epoch
        epoch.batches += 1
        if reading.generators is not None:
            note_draws(self._record.batch_draws, reading.generators, CPU)
        samples = _samples(reading.asked.popleft(), iterator._dataset)
        if samples is None:
            epoch.samples = None
        elif epoch.samples is not None:
            epoch.samples += samples
            epoch.last_batch = len(samples)
        if len(epoch.contents) < MAX_FINGERPRINTS:
            epoch.contents += contents(batch)

    def after_last_batch(self, iterator: Any) -> None:
        self._readings[iterator].epoch.complete = True


def watch(recorder: Recorder) -> DataWatch:
    data = DataWatch(recorder)
    # An iterator that keeps its workers is reset for another epoch.
    recorder.watch(_BaseDataLoaderIter, "__init__", after=data.on_iterator_made)
    recorder.watch(_BaseDataLoaderIter, "_reset", after=data.on_iterator_made)
    recorder.watch(_BaseDataLoaderIter, "_next_index", after=data.on_indices_drawn)
    recorder.watch(_BaseDataLoaderIter, "__next__", data.before_batch, data.after_batch, data.after_last_batch)
    return data


def _is_own_share(inputs: Any, batch: int) -> bool:
    """True if the network was given one rank's share of a batch: of 8 samples, 4 on two ranks."""
    rows = next((len(tensor) for tensor in _tensors(inputs)), 0)
    return 0 < rows * int(os.environ["WORLD_SIZE"]) == batch


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
        stride = max(1, rows.shape[1] // VALUES_PER_TENSOR)
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


def training_epochs(record: Record) -> list[Epoch]:
    """The epochs with forwards in training."""
    return [epoch for epoch in record.epochs if epoch.forwards]


def why_not_comparable(by_rank: tuple[Epoch, ...]) -> str | None:
    """Why the samples of the ranks cannot be compared by their numbers; None where they can."""
    if any(epoch.samples is None or epoch.size is None for epoch in by_rank):
        return "the samples have no numbers"
    if len({epoch.size for epoch in by_rank}) > 1:
        return "the ranks have data sets of different sizes"
    return None


def check_orders(records: list[Record]) -> Answer:
    answers = []
    for record in records:
        epochs = [epoch for epoch in training_epochs(record) if len(epoch.samples or []) >= MIN_SAMPLES]
        for earlier, later in pairwise(epochs):
            if earlier.loader == later.loader:
                answers.append(_order(record.rank, earlier.samples, later.samples))
    return overall(answers, "no two epochs of a DataLoader were seen")


def _order(rank: int, earlier: list[int], later: list[int]) -> Answer:
    length = min(len(earlier), len(later))
    order = earlier[:length]
    if order == sorted(order):
        return NotExamined("the order is not shuffled")
    if order != later[:length]:
        return Right()
    return Finding(
        f"two epochs have {length} of {length} samples in the same places on rank {rank}",
        "call `sampler.set_epoch(epoch)` before each epoch",
        pitfall="set_epoch_forgotten",
    )


def check_evaluation_samples(records: list[Record]) -> Answer:
    evaluations = []
    for record in records:
        evaluations.append([epoch for epoch in record.epochs if not epoch.forwards and epoch.complete])
    answers = []
    for number, by_rank in enumerate(across_ranks(evaluations)):
        answers.append(_evaluation(number, by_rank))
    return overall(answers, "no evaluation was seen whole on all ranks")


def _evaluation(number: int, by_rank: tuple[Epoch, ...]) -> Answer:
    if not all(epoch.by_torch for epoch in by_rank):
        reason = "a library deals out the samples, and may drop those that it repeats when metrics are gathered"
        return NotExamined(reason)
    reason = why_not_comparable(by_rank)
    if reason:
        return NotExamined(reason)
    reads = Counter(chain.from_iterable(epoch.samples for epoch in by_rank))
    each_reads_all = all(set(epoch.samples) == reads.keys() for epoch in by_rank)
    size = by_rank[0].size
    repeated = sum(times > 1 for times in reads.values())
    missing = size - len(reads)
    tail = sum(epoch.last_batch for epoch in by_rank)
    some_dropped = 0 < missing <= tail  # more are missing where somebody evaluates a part
    if each_reads_all or not (repeated or some_dropped):
        return Right()
    return Finding(
        f"{repeated} of {size} samples are read more than once, {missing} never, in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
