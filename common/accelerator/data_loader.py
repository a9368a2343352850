"""Prepared loaders: `prepare_data_loader` gives each process its share, `skip_first_batches` the rest of an epoch.

What they make is in `shard.py` (every process reads its share), `dispatcher.py` (the main process reads for all) and
`resume.py` (checkpoints hold the position).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from .dispatcher import DataLoaderDispatcher
from .operations import broadcast_object_list
from .resume import StatefulDataLoaderDispatcher, StatefulDataLoaderShard
from .sampler import (
    BatchSamplerShard,
    DistributedEvalSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
    generator_of,
    innermost_sampler,
)
from .shard import LOADING_OPTIONS, DataLoaderShard, SkipDataLoader, get_sampler, index_sampler_of  # noqa: F401
from .state import DistributedType, GradientState, PartialState  # noqa: F401
from .streams import CountedCollate, CountedShard, IterableDatasetShard  # noqa: F401
from .utils.dataclasses import RNGType  # noqa: F401


class _Source(NamedTuple):
    """The source of a prepared loader.

    Attributes:
        dataset: the data set; for a stream perhaps its shard.
        arguments: for the loader, by which it reads its samples: the batch sampler, the sampler or the batch size.
        synchronized_generator: the one whose state all processes take over from rank 0.
    """

    dataset: Any
    arguments: dict[str, Any]
    synchronized_generator: torch.Generator | None = None


class _Sharing(NamedTuple):
    """The way in which processes share the data of a loader."""

    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool
    dispatch_batches: bool
    use_seedable_sampler: bool


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

    On several processes a sampler without a generator gets one here, seeded from torch's. With `use_seedable_sampler`
    and no `data_seed` this call is a collective: all processes take over rank 0's seed.

    Args:
        dataloader: what a single process would iterate over.
        device: where batches go with `put_on_device`.
        num_processes, process_index: by default those of the run.
        split_batches, even_batches, non_blocking: see DataLoaderConfiguration.
        put_on_device: send the batches to `device`.
        rng_types: generators to take over from rank 0 at the start of every pass: "torch", "cuda", and "generator",
            the sampler's or the data set's.
        dispatch_batches: the main process reads for all, see DataLoaderDispatcher; by default for streams, if
            `put_on_device` is on.
        slice_fn_for_dispatch: see DataLoaderDispatcher.
        use_seedable_sampler: a RandomSampler becomes a SeedableRandomSampler.
        data_seed: its seed; by default `torch.initial_seed()` of rank 0.
        use_stateful_dataloader: the loader has `state_dict` and `load_state_dict`, for checkpoints, see `resume.py`.

    Raises:
        NotImplementedError: for `torch_device_mesh` and a loader with `in_order=False`.
        ValueError: for a batch size that cannot be split, none where one is needed, `dispatch_batches` without
            `put_on_device`, and on several processes for a DistributedSampler, a DistributedEvalSampler and a
            `batch_size=None`.
    """
    if torch_device_mesh is not None or not getattr(dataloader, "in_order", True):
        raise NotImplementedError("torch_device_mesh and loaders with in_order=False are out of scope")
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and not put_on_device:
        raise ValueError("dispatch_batches=True requires put_on_device=True")
    state = PartialState()
    num_processes = state.num_processes if num_processes is None else num_processes
    sharing = _Sharing(
        num_processes=num_processes,
        process_index=state.process_index if process_index is None else process_index,
        split_batches=split_batches,
        even_batches=even_batches and num_processes > 1,  # a single process gets its batches unchanged
        dispatch_batches=dispatch_batches,
        use_seedable_sampler=use_seedable_sampler,
    )
    _check(dataloader, sharing)
    index_sampler = index_sampler_of(dataloader)
    if use_seedable_sampler:
        index_sampler = _replace_random_sampler(index_sampler, data_seed)
    source = _source(dataloader, index_sampler, sharing)
    loading = _loading_options(dataloader) | source.arguments
    loading["_drop_last"] = dataloader.drop_last
    loading["_non_blocking"] = non_blocking
    if dispatch_batches:
        loading["generator"] = None  # as in the original: what the loader itself draws comes from torch's generator
        dispatcher = StatefulDataLoaderDispatcher if use_stateful_dataloader else DataLoaderDispatcher
        return dispatcher(source.dataset, split_batches, slice_fn=slice_fn_for_dispatch, **loading)
    if rng_types is not None and source.synchronized_generator is None:
        rng_types = [kind for kind in rng_types if kind != "generator"]
    loader_class = StatefulDataLoaderShard if use_stateful_dataloader else DataLoaderShard
    return loader_class(
        source.dataset,
        device=device if put_on_device else None,
        rng_types=rng_types,
        synchronized_generator=source.synchronized_generator,
        **loading,
    )


def _check(dataloader: DataLoader, sharing: _Sharing) -> None:
    sampler = innermost_sampler(index_sampler_of(dataloader))
    if isinstance(sampler, (DistributedSampler, DistributedEvalSampler)) and sharing.num_processes > 1:
        raise ValueError("preparing a loader with a DistributedSampler would shard the data twice: leave it out")
    if not sharing.split_batches:
        return
    size = dataloader.batch_size
    if size is None:
        size = getattr(index_sampler_of(dataloader), "batch_size", None)
    if size is None:
        raise ValueError("split_batches=True needs a loader or a batch sampler with a `batch_size`")
    if size % sharing.num_processes:
        raise ValueError(
            f"split_batches needs a batch size that {sharing.num_processes} processes can split, not {size}"
        )


def _replace_random_sampler(index_sampler: Any, data_seed: int | None) -> Any:
    """`index_sampler`, with a SeedableRandomSampler in the place of a RandomSampler."""
    if isinstance(index_sampler, RandomSampler):
        return _seedable(index_sampler, data_seed)
    sampler = getattr(index_sampler, "sampler", None)
    if isinstance(sampler, RandomSampler):
        index_sampler.sampler = _seedable(sampler, data_seed)
    return index_sampler


def _seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    if data_seed is None:
        data_seed = broadcast_object_list([torch.initial_seed()])[0]
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )


def _source(dataloader: DataLoader, index_sampler: Any, sharing: _Sharing) -> _Source:
    """The source of one process's loader, where a single process would draw from `index_sampler`."""
    if isinstance(dataloader.dataset, IterableDataset):
        return _stream(dataloader, sharing)
    if sharing.dispatch_batches:
        return _Source(dataloader.dataset, _sampling(dataloader, index_sampler))
    return _sharded_batches(dataloader, index_sampler, sharing)


def _stream(dataloader: DataLoader, sharing: _Sharing) -> _Source:
    stream: Any = dataloader.dataset
    sampling: dict[str, Any] = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if sharing.num_processes == 1 or sharing.dispatch_batches:
        return _Source(stream, sampling)
    shard = CountedShard(
        stream,
        batch_size=dataloader.batch_size or 1,
        drop_last=dataloader.drop_last,
        num_processes=sharing.num_processes,
        process_index=sharing.process_index,
        split_batches=sharing.split_batches,
        even_batches=sharing.even_batches,
    )
    if dataloader.batch_size is not None:
        sampling["batch_size"] = shard.samples_per_step
    sampling["collate_fn"] = CountedCollate(dataloader.collate_fn)
    return _Source(shard, sampling, synchronized_generator=generator_of(stream))


def _sharded_batches(dataloader: DataLoader, index_sampler: Any, sharing: _Sharing) -> _Source:
    if dataloader.batch_sampler is None and not isinstance(index_sampler, BatchSampler):
        if sharing.num_processes > 1:
            raise ValueError("on several processes a loader needs batches to share: batch_size=None makes none")
        return _Source(dataloader.dataset, _sampling(dataloader, index_sampler))
    # As in the original, a sampler within a batch sampler within a batch sampler gets no generator.
    sampler = getattr(index_sampler, "sampler", None)
    shard = BatchSamplerShard(
        index_sampler, sharing.num_processes, sharing.process_index, sharing.split_batches, sharing.even_batches
    )
    sampling = _sampling(dataloader, shard)
    if sharing.num_processes == 1:
        if "batch_sampler" in sampling:
            # As in the original, the loader has the script's own batch sampler, to read and to change.
            sampling = {"batch_sampler": index_sampler, "index_batches": shard}
        return _Source(dataloader.dataset, sampling)
    synchronized_generator = None if sharing.use_seedable_sampler else _give_generator(sampler)
    return _Source(dataloader.dataset, sampling, synchronized_generator)


def _give_generator(sampler: Any) -> torch.Generator | None:
    """The generator of `sampler`: where it can have one and has none, a new one that is seeded from torch's."""
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        seed = torch.empty((), dtype=torch.int64).random_()
        sampler.generator.manual_seed(int(seed))
    return generator_of(sampler)


def _sampling(dataloader: DataLoader, index_sampler: Any) -> dict[str, Any]:
    """The arguments with which a loader like `dataloader` draws from `index_sampler`."""
    if dataloader.batch_sampler is None:
        return {"sampler": index_sampler, "batch_size": None}
    return {"batch_sampler": index_sampler}


def _loading_options(dataloader: DataLoader) -> dict[str, Any]:
    """The way in which `dataloader` loads, as arguments for another loader; what it loads is left out."""
    return {name: getattr(dataloader, name) for name in LOADING_OPTIONS}


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """A loader like `dataloader` that leaves out the first `num_batches` batches of every epoch.

    If `dataloader` is prepared, the new loader begins in the same epoch. A script resumes in the middle of epoch e with
    `load_state`, `loader.set_epoch(e)` and this. In sequential and seedable orders the batches that were left follow,
    and torch's generator stays as the checkpoint had it, so dropout goes on too. In other random orders the rest of
    another epoch follows, with a warning. A stream is read again up to there.
    """
    if isinstance(dataloader, DataLoaderShard):
        return dataloader.skipping(num_batches)
    loading = _loading_options(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        loading["batch_size"] = dataloader.batch_size
        loading["drop_last"] = dataloader.drop_last
        return SkipDataLoader(dataloader.dataset, num_batches, **loading)
    rest = SkipBatchSampler(index_sampler_of(dataloader), num_batches)
    return DataLoader(dataloader.dataset, **_sampling(dataloader, rest), **loading)
