"""Streams: which of their samples belong to which process, and which of them are repeated.

A stream is an IterableDataset: it has no sample numbers, and is read from its beginning. In loader workers it is read
as plain torch reads it: each worker has a copy, and yields all of it unless the script shards the samples, by
`get_worker_info` or by its `worker_init_fn`. Only the script can do that: a stream that shuffles comes in another order
in each worker, and one that reads from a queue yields each sample in one worker alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .sampler import ALL_ROWS, BatchSamplerShard, ShortBatch, ShortStep, Tagged


class StreamShard(IterableDataset):
    """The samples of a stream that belong to one process. Every process reads the whole stream.

    The last step is filled up with samples from the first one; with `drop_last` it is dropped. The samples of such a
    step come as Tagged; in a stream that yields ready batches its content is such a batch. A `generator` of the data
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
                yield Tagged(sample, batch.short_step) if isinstance(batch, ShortBatch) else sample


# How a stream's code asks for the rank: `torch.distributed.get_rank()`, an Accelerator, or what torchrun has set.
_RANK_IN_CODE = {"get_rank", "process_index", "RANK", "LOCAL_RANK"}


def seems_sharded_by_rank(stream: Any, rank: int, world_size: int) -> bool:
    """True if `stream` has its rank and the world size as attributes, or asks for the rank in `__init__` or `__iter__`.

    The same holds for the stream that it wraps in the attribute `dataset`. Only a look at the samples of all ranks
    could show for certain that they differ.
    """
    if not isinstance(stream, IterableDataset):
        return False
    # `datasets.distributed.split_dataset_by_node` leaves rank and world size in the attribute `_distributed`.
    for holder in (stream, getattr(stream, "_distributed", None)):
        sizes = [getattr(holder, name, None) for name in ("world_size", "num_replicas", "num_processes")]
        if world_size in sizes and rank in (getattr(holder, "rank", None), getattr(holder, "process_index", None)):
            return True
    for name in ("__init__", "__iter__"):
        code = getattr(getattr(type(stream), name, None), "__code__", None)
        if code is not None and not _RANK_IN_CODE.isdisjoint(code.co_names + code.co_consts):
            return True
    return seems_sharded_by_rank(getattr(stream, "dataset", None), rank, world_size)


def collate_tagged(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """`collate_fn(samples)`; a Tagged batch, if the samples of a StreamShard are Tagged."""
    if isinstance(samples, Tagged):  # with batch_size=None the sample is a batch
        step: Any = samples.short_step
        num_real = ALL_ROWS if step.num_real > 0 else 0
        step_of_batch = ShortStep(num_real, rows=None, num_ranks_present=step.num_ranks_present)
        return Tagged(collate_fn(samples.content), step_of_batch)
    if isinstance(samples, list) and isinstance(samples[0], Tagged):
        return Tagged(collate_fn([sample.content for sample in samples]), samples[0].short_step)
    return collate_fn(samples)
