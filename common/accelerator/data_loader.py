"""Prepared loaders: `prepare_data_loader` gives each process its share, `skip_first_batches` the rest of an epoch.

What they make is in `shard.py` (every process reads its share) and `dispatcher.py` (the main process reads for all).
"""

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from .dispatcher import DataLoaderDispatcher
from .logging import get_logger
from .operations import broadcast_object_list, gather_object
from .reader import loading_arguments
from .sampler import (
    BatchSamplerShard,
    DistributedEvalSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
    check_split,
    generator_of,
    index_sampler_of,
    sampler_chain,
)
from .shard import DataLoaderShard
from .state import PartialState
from .streams import StreamShard, seems_sharded_by_rank

# isort: split
# The original has these names in its module of this name too, so scripts import them from here.
from .sampler import get_sampler  # noqa: F401
from .state import DistributedType, GradientState  # noqa: F401
from .utils.dataclasses import RNGType  # noqa: F401

logger = get_logger(__name__)


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """The loader for one process: its share of the batches that `dataloader` would make on a single one.

    The script's sampler draws the order. With `use_seedable_sampler`, a RandomSampler is replaced by one whose order
    depends on `data_seed` and the epoch alone. On several processes all must draw one order. So a sampler without a
    generator gets one here, and at each pass takes over the state of rank 0's (`rng_types`), see DATA.md. The new
    sampler or generator is put into the script's own batch sampler or sampler.

    `use_seedable_sampler` makes this a collective: the default of `data_seed` is the seed of rank 0, and with samplers
    of other kinds the states of all processes' generators are compared.

    Args:
        dataloader: what a single process would iterate over. Batches come in their order, also with `in_order=False`.
        device: where batches go with `put_on_device`. A dispatching loader puts them on the device of its process.
        num_processes, process_index: by default those of the run, by which a dispatching loader always shares.
        split_batches, even_batches, non_blocking, use_seedable_sampler, data_seed: see DataLoaderConfiguration.
        rng_types: generators to take over from rank 0 at the start of every pass: "torch", "cuda", and "generator",
            the sampler's or the data set's. A dispatching loader takes over none, as in the original.
        dispatch_batches, slice_fn_for_dispatch: the main process reads for all, see DataLoaderDispatcher; by default
            for streams, if `put_on_device` is on.
        use_stateful_dataloader: checkpoints hold the loader's position, see `resumption.py`.

    Raises:
        NotImplementedError: for `torch_device_mesh`, with which several processes would get the same batch.
        ValueError: for a batch size that cannot be split, and for `dispatch_batches` without `put_on_device`. On
            several processes for a DistributedSampler or DistributedEvalSampler that shards, for a SkipDataLoader that
            leaves out no whole number of steps and, unless the loader dispatches, for one that makes no batches.
    """
    if torch_device_mesh is not None:
        raise NotImplementedError("torch_device_mesh is out of scope")
    if dispatch_batches and not put_on_device:
        raise ValueError("dispatch_batches=True requires put_on_device=True")

    dataset: Any = dataloader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and is_stream
    state = PartialState()
    if num_processes is None or dispatch_batches:
        num_processes = state.num_processes
    process_index = state.process_index if process_index is None else process_index
    index_sampler = index_sampler_of(dataloader)
    if not dataloader.in_order:
        logger.warning("a loader with in_order=False is read in order")
    _check_sharing(dataloader, num_processes, split_batches, dispatch_batches)
    skipped_steps = _skipped_steps(dataloader, 1 if split_batches else num_processes)
    if use_seedable_sampler:
        index_sampler = _replace_random_sampler(index_sampler, data_seed)

    settings: dict[str, Any] = {
        "skip_batches": skipped_steps,
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
    }
    if dispatch_batches:
        # As in the original, the seed that torch's loader draws comes from torch's generator.
        loading = loading_arguments(dataloader, index_sampler) | {"generator": None}
        return DataLoaderDispatcher(dataset, split_batches, slice_fn_for_dispatch, **settings, **loading)

    settings |= {"device": device if put_on_device else None, "rng_types": rng_types}
    if num_processes == 1:
        return DataLoaderShard(dataset, **settings, **loading_arguments(dataloader, index_sampler))

    sharding: tuple = (num_processes, process_index, split_batches, even_batches)
    if is_stream:
        # A stream has no sample numbers, so the samples themselves are batched and dealt out, as if it were a sampler.
        size: Any = dataloader.batch_size
        shard = BatchSamplerShard(BatchSampler(dataset, size, dataloader.drop_last), *sharding)
        loading = loading_arguments(dataloader, None) | {"batch_size": shard.samples_per_process}
        generator = generator_of(dataset)
        return DataLoaderShard(StreamShard(dataset, shard), synchronized_generator=generator, **settings, **loading)

    generator = _generator_for_all(index_sampler, use_seedable_sampler, rng_types)
    loading = loading_arguments(dataloader, BatchSamplerShard(index_sampler, *sharding))
    return DataLoaderShard(dataset, synchronized_generator=generator, **settings, **loading)


def _skipped_steps(dataloader: DataLoader, batches_per_step: int) -> int:
    """Steps that an unprepared loader leaves out. A ValueError if they are no whole number."""
    skipped = dataloader.skip_batches if isinstance(dataloader, SkipDataLoader) else 0
    if skipped % batches_per_step:
        raise ValueError(f"{skipped} skipped batches are no whole number of steps: skip steps after `prepare` instead")
    return skipped // batches_per_step


def _generator_for_all(index_sampler: Any, use_seedable_sampler: bool, rng_types: Any) -> torch.Generator | None:
    """The sampler's generator, which all take over from rank 0; None if it has none, or all draw alike without that."""
    # As in the original, a sampler that lies deeper, within a second batch sampler, gets no generator.
    sampler: Any = getattr(index_sampler, "sampler", None)
    if not hasattr(sampler, "generator") or (use_seedable_sampler and _draws_alike_on_all(sampler, rng_types)):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        seed = torch.empty((), dtype=torch.int64).random_()
        sampler.generator.manual_seed(int(seed))
    return generator_of(sampler)


def _draws_alike_on_all(sampler: Any, rng_types: list[str] | None) -> bool:
    """True if the processes draw one order from `sampler` already. A collective, where its class does not say so."""
    if isinstance(sampler, SeedableRandomSampler) or getattr(sampler, "replacement", False):
        return True  # The order follows from the epoch, or each sample is drawn by itself.
    if sampler.generator is None and "torch" in (rng_types or ()):
        return True  # Each pass takes over torch's.
    state = (generator_of(sampler) or torch.default_generator).get_state()
    states = gather_object([state])
    return all(torch.equal(state, other) for other in states)


def _check_sharing(dataloader: DataLoader, num_processes: int, split_batches: bool, dispatch_batches: bool) -> None:
    """Refuse a loader that several processes cannot share, and warn if it may be shared already."""
    index_sampler = index_sampler_of(dataloader)
    if split_batches:
        check_split(getattr(index_sampler, "batch_size", None), num_processes)
    if num_processes == 1:
        return
    samplers = sampler_chain(index_sampler)
    chain = [sampler for sampler in samplers if not isinstance(sampler, SkipBatchSampler)]
    for sampler in chain:  # A script's own DistributedSampler may draw from another sampler.
        if isinstance(sampler, (DistributedSampler, DistributedEvalSampler)) and sampler.num_replicas > 1:
            raise ValueError("preparing a loader with a DistributedSampler would shard the data twice: leave it out")
    makes_batches = dataloader.batch_sampler is not None or isinstance(chain[0], BatchSampler)
    if not dispatch_batches and not makes_batches:
        raise ValueError("on several processes a loader needs batches to share: batch_size=None makes none")
    stream = dataloader.dataset
    if seems_sharded_by_rank(stream, num_processes):
        logger.warning(
            f"{type(stream).__name__} knows its rank: if it yields the samples of this rank alone, most of them are "
            "lost, because a prepared loader deals all samples out by itself. Let the stream yield all of them, or "
            "leave its loader unprepared"
        )


def _replace_random_sampler(index_sampler: Any, data_seed: int | None) -> Any:
    """`index_sampler` with a seedable sampler in place of a RandomSampler; the default of the seed is rank 0's."""
    sampler = getattr(index_sampler, "sampler", index_sampler)
    if not isinstance(sampler, RandomSampler):
        return index_sampler
    if data_seed is None:
        data_seed = broadcast_object_list([torch.initial_seed()])[0]
    seedable = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
    if sampler is index_sampler:  # The loader has a `batch_size=None`.
        return seedable
    index_sampler.sampler = seedable
    return index_sampler


class SkipDataLoader(DataLoader):
    """An unprepared loader without its first `skip_batches` batches; `skip_first_batches` makes it for streams."""

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """A loader like `dataloader` that leaves out the first `num_batches` batches of every epoch.

    If `dataloader` is prepared, these are batches of every process: whole steps. Then both loaders have the same epoch:
    after a pass over either, each visits the next one. A script resumes in the middle of epoch e with `load_state`,
    `loader.set_epoch(e)` and this, see DATA.md. A stream is read again up to there.
    """
    num_batches = max(0, math.ceil(num_batches))  # A script may compute 2.0.
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.without_first(num_batches)
    if isinstance(dataloader, SkipDataLoader):
        num_batches += dataloader.skip_batches
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(dataloader.dataset, num_batches, **loading_arguments(dataloader, None))
    rest = SkipBatchSampler(index_sampler_of(dataloader), num_batches)
    return DataLoader(dataloader.dataset, **loading_arguments(dataloader, rest))
