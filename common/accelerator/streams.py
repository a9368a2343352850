"""Streams: which of their samples belong to which process, and which of them are repeated.

A stream is an IterableDataset: it has no sample numbers, and is read from its beginning. In loader workers it is read
as plain torch reads it: each worker has a copy, and yields all of it unless the script shards the samples.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from .sampler import BatchSamplerShard, Step, generator_of


class StreamShard(IterableDataset):
    """The batches of a stream that belong to one process, each a Step of samples. Every process reads the whole stream.

    A `generator` of the data set is seeded with the epoch unless the data set has `set_epoch`.

    Args:
        shard: its batches for this process. A BatchSamplerShard shares batches of samples as those of sample numbers.
    """

    def __init__(self, dataset: IterableDataset, shard: BatchSamplerShard) -> None:
        self.dataset = dataset
        self.shard = shard
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this process, its last batch taken as full."""
        return len(self.shard) * self.shard.samples_per_process

    def __iter__(self) -> Iterator[Step]:
        generator = generator_of(self.dataset)
        if generator is not None and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        yield from self.shard.steps()


def collate_step(collate_fn: Callable[[list], Any], step: Step) -> Step:
    """`step` of a StreamShard, with a batch in the place of its samples."""
    return step._replace(content=collate_fn(step.content))


def seems_sharded_by_rank(stream: Any, world_size: int) -> bool:
    """True if `stream`, or the one that it wraps in the attribute `dataset`, has a rank and the world size.

    These are attributes of its own or, after `datasets.distributed.split_dataset_by_node`, in `_distributed`.
    """
    if not isinstance(stream, IterableDataset):
        return False
    for holder in (stream, getattr(stream, "_distributed", None)):
        sizes = [getattr(holder, name, None) for name in ("world_size", "num_replicas", "num_processes")]
        if world_size in sizes and (hasattr(holder, "rank") or hasattr(holder, "process_index")):
            return True
    return seems_sharded_by_rank(getattr(stream, "dataset", None), world_size)
