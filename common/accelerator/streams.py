"""Streams: which of their samples belong to which process, and which of them are repeated.

A stream is an IterableDataset: it has no sample numbers, and is read from its beginning. In loader workers it is read
as plain torch reads it: each worker has a copy, and yields all of it unless the script shards the samples, by
`get_worker_info` or by its `worker_init_fn`. Only the script can do that: a stream that shuffles comes in another order
in each worker, and one that reads from a queue yields each sample in one worker alone.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from types import CodeType
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .sampler import BatchSamplerShard, Counted, PartialBatch


class CountedShard(IterableDataset):
    """The samples of a stream that belong to one process. Every process reads the whole stream.

    The last step is filled up with samples from the first one; with `drop_last` it is dropped. The samples of such a
    step come as Counted; in a stream that yields ready batches its content is such a batch. A `generator` of the data
    set is seeded with the epoch unless the data set has `set_epoch`.

    Args:
        dataset: the stream.
        shard: its batches for this process. A BatchSamplerShard shares batches of samples as those of sample numbers.
    """

    def __init__(self, dataset: IterableDataset, shard: BatchSamplerShard) -> None:
        self.dataset = dataset
        self.shard = shard
        self.epoch = 0

    @property
    def samples_per_step(self) -> int:
        """Samples of this process in a whole step."""
        shard = self.shard
        return shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, of the data set too."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this process, its last batch taken as full."""
        return len(self.shard) * self.samples_per_step

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        for batch in self.shard:
            for sample in batch:
                yield Counted(sample, batch.partial) if isinstance(batch, PartialBatch) else sample


# How a stream's code asks for the rank: `torch.distributed.get_rank()`, an Accelerator, or what torchrun has set.
_RANK_IN_CODE = {"get_rank", "process_index", "RANK", "LOCAL_RANK"}


def _asks_for_rank(code: CodeType) -> bool:
    """True if `code`, or a function or a generator expression within it, asks for the rank."""
    if not _RANK_IN_CODE.isdisjoint(code.co_names + code.co_consts):
        return True
    return any(_asks_for_rank(constant) for constant in code.co_consts if isinstance(constant, CodeType))


def seems_sharded_by_rank(stream: Any, rank: int, world_size: int) -> bool:
    """True where `stream`, or what is under it, knows its rank or asks for it: it seems to yield this rank's part.

    That the ranks' samples differ could be seen for certain only by reading some on every rank, before the first step.
    """
    while isinstance(stream, IterableDataset):
        # `datasets.distributed.split_dataset_by_node` leaves rank and world size in the attribute `_distributed`.
        for holder in (stream, getattr(stream, "_distributed", None)):
            sizes = [getattr(holder, name, None) for name in ("world_size", "num_replicas", "num_processes")]
            if world_size in sizes and rank in (getattr(holder, "rank", None), getattr(holder, "process_index", None)):
                return True
        for attribute in chain.from_iterable(vars(kind).values() for kind in type(stream).__mro__):
            code = getattr(attribute, "__code__", None)
            if isinstance(code, CodeType) and _asks_for_rank(code):
                return True
        stream = getattr(stream, "dataset", None)
    return False


class CountedCollate:
    """`collate_fn` for samples of a stream. A batch of Counted samples becomes one that is Counted."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Counted):  # with batch_size=None the sample is a batch
            partial: Any = samples.partial
            return Counted(self.collate_fn(samples.content), partial.of_unknown_rows())
        if isinstance(samples, list) and isinstance(samples[0], Counted):
            return Counted(self.collate_fn([sample.content for sample in samples]), samples[0].partial)
        return self.collate_fn(samples)
