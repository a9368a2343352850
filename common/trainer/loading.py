"""The reading of loaders: those that a Trainer makes, and those that an override of its methods returns.

In a step of an evaluation each rank reads a batch. A *short step*, as in the core, has too few samples for full batches
on all ranks. An example with 13 samples, 2 ranks and batches of 4:

    step       rank 0       rank 1
    1          0 1 2 3      4 5 6 7
    2 (short)  8 9 10 11    12 0 1 2

In step 2 rank 1 has one *real* sample, 12, and three *repeated* ones, which its model is not given. A rank that has no
real sample gives its model the repeated ones, because ranks that share a model compute together; no result keeps them.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from common.accelerator import Accelerator, skip_first_batches, utils
from common.accelerator.data_loader import DataLoaderShard
from common.accelerator.rows import Entries
from common.accelerator.sampler import index_sampler_of, sampler_chain
from common.accelerator.utils.random import set_random_states
from common.eval_sampler import DistributedEvalSampler
from common.trainer.batches import first_samples


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed all generators of a loader worker by that of torch, which has another seed in each worker and epoch."""
    # The seed of torch is the same on all ranks. An offset for each rank keeps them apart.
    utils.set_seed(num_workers * rank + torch.initial_seed() % 2**32)


def is_prepared(loader: Any) -> bool:
    """True for a loader of the accelerator: it puts batches on the device, and its position is in checkpoints."""
    return isinstance(loader, DataLoaderShard)


def deal_out(loader: Any, accelerator: Accelerator) -> Any:
    """A loader, which an override may have made, as each rank is to read it.

    A plain `DataLoader` is dealt out to the ranks, unless its sampler does that. A prepared one is only registered, so
    that checkpoints hold its position. Any other is read as it is by every rank.
    """
    if not is_prepared(loader):
        if accelerator.num_processes == 1 or not isinstance(loader, DataLoader):
            return loader
        sampler = sampler_chain(index_sampler_of(loader))[-1]
        if isinstance(sampler, DistributedSampler | DistributedEvalSampler):
            return loader
    return accelerator.prepare_data_loader(loader)


def length_of(data: Any) -> int | None:
    """The length of a loader or a data set; None where it has none, as a stream."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a stream has none, or says that it does not know it
        return None


def samples_per_batch(loader: Any, num_processes: int) -> int:
    """Samples of all ranks in a micro-batch; a loader of an override that does not say it counts one for each rank."""
    if is_prepared(loader):
        return loader.total_batch_size or num_processes
    return (getattr(loader, "batch_size", None) or 1) * num_processes


def read_batches(loader: Any, accelerator: Accelerator) -> Iterator[Any]:
    """The batches of any loader, on the device."""
    for batch in loader:
        yield batch if is_prepared(loader) else utils.send_to_device(batch, accelerator.device)


class SkippedBatches(NamedTuple):
    """The batches that a resumed run leaves out of its first epoch, and the random states to go on with after that."""

    number: int
    random_states_after: dict[str, Any]


def read_windows(
    loader: Any, epoch: int, sizes: Iterable[int], skipped: SkippedBatches | None, accelerator: Accelerator
) -> Generator[list[Any], None, None]:
    """The micro-batches of an epoch on the device, in windows of the given sizes; the last one may be smaller.

    A whole window is read at once, because the loss of each of its micro-batches may depend on the labels of all.
    """
    left_to_skip = 0 if skipped is None else skipped.number
    if is_prepared(loader) and left_to_skip > 0:
        loader = skip_first_batches(loader, left_to_skip)
        left_to_skip = 0
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    micro_batches = islice(read_batches(loader, accelerator), left_to_skip, None)
    for size in sizes:
        window = list(islice(micro_batches, size))
        if skipped is not None:
            # Reading the skipped batches has drawn random numbers. From here on the run must draw as the saved one did.
            set_random_states(accelerator.device, skipped.random_states_after)
            skipped = None
        if not window:
            # A stream has no length, so its end is not planned.
            return
        yield window


class BatchRows(NamedTuple):
    """The samples in a rank's batch of an evaluation.

    Attributes:
        num_rows: the samples that the model is given.
        num_real: how many of them are real; they are the first ones.
        in_short_step: True if the batch is part of a short step.
    """

    num_rows: int
    num_real: int
    in_short_step: bool

    def real_part(self, part: Any) -> Any:
        """Outputs or labels of the real samples.

        As in the original, an output of a short step is cut even if it has no row for each sample.
        """
        return part[: self.num_real] if self.in_short_step else part


def read_eval_batches(loader: Any, batch_size: int, accelerator: Accelerator) -> Iterator[tuple[Any, BatchRows]]:
    """The batches of an evaluation, without repeated samples where there are real ones.

    `batch_size` is the number of samples where neither the loader nor the batch says it.
    """
    for batch in read_batches(loader, accelerator):
        short_step = loader.short_step if is_prepared(loader) else None
        if short_step is None:
            num_rows = _count_samples(loader, batch, accelerator.num_processes) or batch_size
            yield batch, BatchRows(num_rows, num_real=num_rows, in_short_step=False)
            continue
        num_rows = short_step.rows[accelerator.process_index]
        num_real = short_step.num_real(accelerator.process_index)
        if 0 < num_real < num_rows:
            batch = first_samples(batch, num_rows, num_real)
            num_rows = num_real
        yield batch, BatchRows(num_rows, num_real, in_short_step=True)


def _count_samples(loader: Any, batch: Any, num_processes: int) -> int | None:
    """Samples in a batch that is not part of a short step; None where neither loader nor batch says it.

    The loader is asked first, because a collator may have joined the samples to one row.
    """
    if is_prepared(loader):
        # The last batch of a stream may be smaller, which on a single process is no short step.
        is_full = num_processes > 1 or not isinstance(loader.dataset, IterableDataset)
        if is_full and getattr(index_sampler_of(loader), "batch_size", None):
            return loader.total_batch_size // num_processes
    try:
        return Entries(batch).count_rows()
    except ValueError:  # it is an object of the script's own
        return None
