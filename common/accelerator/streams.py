"""Streams: which of their samples belong to which process and which loader worker, and which are repeated.

A stream is an IterableDataset: it has no sample numbers, and is read from its beginning.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from .sampler import BatchSamplerShard, PartialStep, Share


class IterableDatasetShard(IterableDataset):
    """The samples of a stream that belong to one process. Every process reads the whole stream.

    The stream is cut into batches, which are shared as BatchSamplerShard shares them. The last step is filled up with
    samples from the first one; with `drop_last` it is dropped.

    A `generator` of the data set is seeded with the epoch unless the data set has `set_epoch`.

    Args:
        dataset: the stream.
        batch_size: samples per process and step; with `split_batches` those of all processes.
        drop_last: leave out the samples that do not fill a step.
        num_processes: how many processes share the stream.
        process_index: whose share this is.
        split_batches: every process gets a part of each batch instead of every `num_processes`-th batch.
        even_batches: fill the last step up. Otherwise the last processes get less of it, or nothing.

    Raises:
        ValueError: if `split_batches` cannot split the batch size evenly.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0
        self._shard()  # raises for a batch size that cannot be split

    @property
    def samples_per_step(self) -> int:
        """Samples of this process in a whole step."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def _shard(self) -> BatchSamplerShard:
        """The stream as batches of samples, dealt out like batches of sample numbers."""
        batches = BatchSampler(self.dataset, self.batch_size, self.drop_last)
        return BatchSamplerShard(batches, self.num_processes, self.process_index, self.split_batches, self.even_batches)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, of the data set too."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this process, its last batch taken as full."""
        return len(self._shard()) * self.samples_per_step

    def shares(self) -> Iterator[Share]:
        """This process's samples, step by step."""
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        shard = self._shard()
        yield from shard.shares(shard.batch_sampler, 0)

    def __iter__(self) -> Iterator[Any]:
        for share in self.shares():
            yield from share.batch


class WholeStream:
    """A stream that one process reads for itself or for all, as shares of `batch_size` samples."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def shares(self) -> Iterator[Share]:
        return map(Share, BatchSampler(self.dataset, self.batch_size, drop_last=False))


class CountedSample(NamedTuple):
    """A sample of a partial step, with the counts that the loader needs to know which samples are real.

    In a stream that yields ready batches the content is such a batch.
    """

    content: Any
    partial: PartialStep


class StreamReader(IterableDataset):
    """A stream as loader workers are to read it: no sample twice, and in the epoch that the loader is in.

    Every worker has a copy of the stream. A data set that asks which worker it is in deals its samples out by itself,
    and each worker then reads all that its copy yields. Of any other data set the workers take the steps in turn,
    which is the order in which the DataLoader asks them.

    Samples of partial steps come as CountedSample.

    Args:
        source: the stream in steps: an IterableDatasetShard or a WholeStream.
        num_workers: of the loader.
    """

    def __init__(self, source: Any, num_workers: int) -> None:
        self.source = source
        # Workers that stay alive over epochs see the epoch only through memory that they share with this process.
        self.epoch_for_workers = torch.zeros((), dtype=torch.int64).share_memory_() if num_workers else None

    @property
    def dataset(self) -> IterableDataset:
        """The script's own."""
        return self.source.dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, in the workers too."""
        if self.epoch_for_workers is not None:
            self.epoch_for_workers.fill_(epoch)
        self.source.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        for share in self._shares():
            if share.partial is None:
                yield from share.batch
            else:
                for sample in share.batch:
                    yield CountedSample(sample, share.partial)

    def _shares(self) -> Iterator[Share]:
        worker = torch_worker.get_worker_info()
        if worker is None:
            yield from self.source.shares()
            return
        if self.epoch_for_workers is not None:
            self.source.set_epoch(int(self.epoch_for_workers))
        watched: Any = _WatchedWorkerInfo(worker)
        torch_worker._worker_info = watched
        for step, share in enumerate(self.source.shares()):
            # By the first step the data set has begun to read, and has asked for its worker if it ever does.
            if watched.was_asked or step % worker.num_workers == worker.id:
                yield share


class _WatchedWorkerInfo:
    """The information that `get_worker_info` returns, and whether anybody has looked at it."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self.was_asked = False

    def __getattr__(self, name: str) -> Any:
        self.was_asked = True
        return getattr(self._info, name)


class CountedCollate:
    """`collate_fn` for samples of a stream. A batch of CountedSample objects becomes one CountedSample."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, CountedSample):  # with batch_size=None the sample is a batch
            return CountedSample(self.collate_fn(samples.content), samples.partial.of_unknown_rows())
        if isinstance(samples, list) and isinstance(samples[0], CountedSample):
            batch = self.collate_fn([sample.content for sample in samples])
            return CountedSample(batch, samples[0].partial)
        return self.collate_fn(samples)
