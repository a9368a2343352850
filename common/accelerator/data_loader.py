"""A DataLoader that hands each process its share, knows its last batch, and can continue where it was stopped."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torch.utils.data._utils import worker as torch_worker

from .operations import broadcast_object_list, recursively_apply, send_to_device, slice_tensors
from .sampler import BatchSamplerShard, DistributedEvalSampler, EvalBatches, SeedableRandomSampler, SkipBatchSampler
from .state import GradientState, PartialState
from .utils.random import synchronize_rng_states


class _Tail(NamedTuple):
    """A sample, or a batch, from a step of a stream that is `irregular`, as ShardedBatches has it."""

    content: Any
    irregular: tuple[int | None, int]


class _Collate:
    """`collate_fn`, with an empty batch for no samples and a tagged one for samples from the tail of a stream."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __call__(self, samples: Any) -> Any:
        if type(samples) is _Tail:  # batch_size=None: the sample is a batch
            return _Tail(self.collate_fn(samples.content), samples.irregular)
        if isinstance(samples, list) and not samples:
            fetch = getattr(self.dataset, "__getitems__", lambda indices: [self.dataset[i] for i in indices])
            return recursively_apply(lambda tensor: tensor[:0], self.collate_fn(fetch([0])))
        if type(samples) is list and type(samples[0]) is _Tail:
            return _Tail(self.collate_fn([sample.content for sample in samples]), samples[0].irregular)
        return self.collate_fn(samples)


class IterableDatasetShard(IterableDataset):
    """The samples of a stream that belong to one process, and within it to one loader worker.

    The stream is cut into steps of `num_processes` batches, or of one batch with `split_batches`; each process takes
    its part of every step, and its workers take the steps in turn, which is the order in which the DataLoader asks
    them. So nothing comes twice, and the order does not depend on the number of workers, whether the dataset knows of
    workers or not. The last step is filled with samples from the first one; with `drop_last` it is dropped; without
    `even_batches` the last processes get less of it or nothing. Every process reads the whole stream.

    A `generator` of the dataset is seeded with `seed + epoch` unless the dataset has `set_epoch`.

    Raises:
        ValueError: if `split_batches` cannot split the batch size evenly.
    """

    even_batches, seed, epoch = True, 0, 0
    # Whether the samples of an irregular step come as _Tail; and whether they are those of all processes.
    tags_tail = whole = False
    _worker = None

    def __init__(self, dataset, batch_size=1, drop_last=False, num_processes=1, process_index=0, split_batches=False):
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = num_processes, process_index, split_batches
        self.share = batch_size // num_processes if split_batches else batch_size
        self._dealt()

    def _dealt(self) -> BatchSamplerShard:
        """The stream dealt out like sample numbers."""
        batches = BatchSampler(self.dataset, self.batch_size, self.drop_last)
        dealt = BatchSamplerShard(batches, self.num_processes, self.process_index, self.split_batches)
        dealt.even_batches, dealt.whole = self.even_batches, self.whole
        return dealt

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this process, its last batch taken as full."""
        return len(self._dealt()) * self.share

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        self._worker = self._worker or torch_worker.get_worker_info()
        torch_worker._worker_info = None  # a dataset that shards by worker is to yield all it has
        own, workers = (self._worker.id, self._worker.num_workers) if self._worker else (0, 1)
        for step, (samples, irregular) in enumerate(self._dealt().shares()):
            if step % workers == own:
                for sample in samples:
                    yield _Tail(sample, irregular) if irregular and self.tags_tail else sample


@dataclass
class _Progress:
    """How far a loader is: steps handed out in this epoch, and steps to pass over in the next iteration."""

    epoch: int = 0
    step: int = 0
    resume_at: int = 0


class DataLoaderShard(DataLoader):
    """A DataLoader for one process of several: on the right device, reproducible, resumable.

    Each `for` visits the next epoch, also after one that was left early; `iteration` is its number. After
    `load_state_dict` the next `for` continues with the batch after the last one handed out.

    Args:
        dataset, kwargs: of DataLoader.
        device: where the batches go; None leaves them.
        rng_types: generators that all processes take over from rank 0 at the start of every `for`: "torch", "cuda", or
            "generator" for `synchronized_generator`.
        skip_batches: batches to pass over in every `for`.

    Attributes:
        end_of_dataloader: whether the batch just handed out is the last.
        irregular: None if all samples of this step are real and every process has equally many; else how many of this
            process's first samples are real (None: all), and how many processes, lowest ranks first, have a batch.
    """

    def __init__(self, dataset, device=None, rng_types=None, synchronized_generator=None, skip_batches=0, **kwargs):
        self._non_blocking = kwargs.pop("_non_blocking", False)
        super().__init__(dataset, **kwargs)
        self.device, self.skip_batches = device, skip_batches
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator
        self.gradient_state = GradientState()
        self.end_of_dataloader, self.irregular = False, None
        self._progress = _Progress()
        # What else an epoch seeds: (generator, seed) pairs, and the workers, by seed and rank.
        self._seeded: list[tuple[torch.Generator, int]] = []
        self._worker_seed: tuple[int, int] | None = None

    @property
    def shards(self) -> Any:
        """What deals out the samples of this loader: a batch sampler, a sampler or a stream."""
        return self.dataset if isinstance(self.dataset, IterableDataset) else _batches_of(self)

    @property
    def iteration(self) -> int:
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` visit `epoch`; where a checkpoint stopped in that very epoch, it continues there."""
        resume_at = self._progress.resume_at if epoch == self._progress.epoch else 0
        vars(self._progress).update(epoch=epoch, step=resume_at, resume_at=resume_at)

    def __len__(self) -> int:
        """Batches in a whole epoch on this process, also while a checkpoint's epoch is being finished."""
        return max(0, super().__len__() - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        progress, loaders = self._progress, self.gradient_state.dataloader_references
        if progress.step > progress.resume_at and not self.skip_batches:  # the last one was left early
            progress.epoch += 1
        start = self.skip_batches or progress.resume_at
        progress.step, progress.resume_at = start, 0
        self._seed(progress.epoch, start)
        loaders.append(self)
        try:
            for batch in self._batches(start):
                progress.step += 1
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                yield batch
        finally:
            loaders.remove(self)
            self.end_of_dataloader, self.irregular = False, None
        progress.epoch += 1
        progress.step = 0

    def _seed(self, epoch: int, start: int) -> None:
        for generator, seed in self._seeded:
            generator.manual_seed(seed + epoch)
        if self._worker_seed is not None:
            # The base class draws the workers' base seed from it: another one for every rank, epoch and resumption.
            self.generator.manual_seed(hash((*self._worker_seed, epoch, start)) % 2**63)
        for part in (*_chain(self.shards), self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _batches(self, start: int) -> Iterator[Any]:
        return self._numbered(start) if hasattr(self.shards, "shares") else self._looked_ahead(start)

    def _numbered(self, start: int) -> Iterator[Any]:
        shards = self.shards
        shards.start = start
        for step, batch in enumerate(super().__iter__()):
            self.end_of_dataloader, self.irregular = step == shards.last_step, shards.irregular.get(step)
            yield batch

    def _looked_ahead(self, start: int) -> Iterator[Any]:
        nothing = object()
        batches = islice(super().__iter__(), start, None)
        batch = next(batches, nothing)
        while batch is not nothing:
            following = next(batches, nothing)
            self.end_of_dataloader, self.irregular = following is nothing, None
            if type(batch) is _Tail:
                batch, (real, present) = batch
                # With batch_size=None the samples of the stream are batches, all rows of which are real or none.
                self.irregular = None if self.batch_size is None and real else real, present
            yield batch
            batch = following

    @property
    def total_batch_size(self) -> int:
        """Samples of a whole step over all processes; batches, where the data come without a batch size."""
        shards = self.shards
        processes = 1 if getattr(shards, "split_batches", False) else getattr(shards, "num_processes", 1)
        return (getattr(shards, "batch_size", None) or 1) * processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole data set."""
        return len(self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the steps of it that were handed out; the same on every process."""
        progress = self._progress
        return {"epoch": progress.epoch, "step": progress.step, "step_size": self.total_batch_size}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next `for` continue there, on any number of processes with the same samples per step.

        Raises:
            ValueError: if the samples handed out are no whole number of this loader's steps.
        """
        samples = state_dict["step"] * state_dict["step_size"]
        step, rest = divmod(samples, self.total_batch_size)
        if rest:
            where = f"{samples} samples of epoch {state_dict['epoch']}"
            raise ValueError(f"it stopped after {where}, no whole number of steps of {self.total_batch_size}")
        vars(self._progress).update(epoch=state_dict["epoch"], step=step, resume_at=step)


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that the main process alone reads, whole steps at a time, and whose batches it sends to the others.

    For data that the others cannot read, or that can be read only once. Every process gets what it would get from a
    DataLoaderShard, later: the whole step travels to all of them. What the main process raises is raised on all.

    Attributes:
        slice_fn: `slice_fn(batch, slice, process_index=…, num_processes=…)` is the part of a step's batch in `slice`;
            by default `operations.slice_tensors`.
    """

    slice_fn: Any = None

    def _batches(self, start: int) -> Iterator[Any]:
        rank, processes = self.shards.process_index, self.shards.num_processes
        size = self.total_batch_size // processes
        reading = super()._batches(start) if rank == 0 else None
        following = self._receive(reading)
        while following:
            batch, real, present = following
            following = self._receive(reading)
            self.end_of_dataloader = not following or rank >= following[2]
            self.irregular = None if real is None else (min(max(real - rank * size, 0), size), present)
            if rank < present:
                rows = slice(rank * size, (rank + 1) * size)
                yield (self.slice_fn or slice_tensors)(batch, rows, process_index=rank, num_processes=processes)

    def _receive(self, reading: Iterator[Any] | None) -> Any:
        """A step's batch, how many of its samples are real (None: all) and how many processes have some; or nothing."""
        failure, step = None, ()
        try:
            for batch in islice(reading or (), 1):
                step = batch, *(self.irregular or (None, self.shards.num_processes))
        except Exception as error:
            failure, step = error, f"rank 0: {type(error).__name__}: {error}"
        step = broadcast_object_list([step])[0]
        if isinstance(step, str):
            raise failure or RuntimeError(step)
        return step


def get_sampler(dataloader: DataLoader) -> Any:
    """What draws the sample numbers for `dataloader`, under the batch samplers."""
    return list(_chain(_batches_of(dataloader)))[-1]


def _batches_of(dataloader: DataLoader) -> Any:
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def _chain(sampler: Any) -> Iterator[Any]:
    """`sampler`, what it draws from, and so on."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


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
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """The loader for one process: its share of the batches, in an order that depends on seed and epoch alone.

    A collective where the order is drawn at random and `data_seed` is None: all processes take over rank 0's seed. A
    loader whose sampler is a DistributedEvalSampler is sharded already and keeps its batches.

    Args:
        dataloader: what a single process would iterate over.
        device: where batches go with `put_on_device`.
        num_processes, process_index: by default those of the run.
        split_batches, dispatch_batches, even_batches, data_seed, non_blocking: see DataLoaderConfiguration.
        slice_fn_for_dispatch: see DataLoaderDispatcher.
        rng_types: generators to take over from rank 0 at the start of every epoch: "torch", "cuda". "generator", that
            of the sampler or dataset, agrees as it is.
        use_seedable_sampler, use_stateful_dataloader: what they ask for holds with either value.

    Raises:
        NotImplementedError: for `torch_device_mesh` and a loader with `in_order=False`.
        ValueError: for a batch size that cannot be split, none where one is needed, and on several processes for a
            DistributedSampler.
    """
    if torch_device_mesh is not None or not getattr(dataloader, "in_order", True):
        raise NotImplementedError("torch_device_mesh and loaders with in_order=False are out of scope")
    state = PartialState()
    processes = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    even_batches, dispatch = even_batches and processes > 1, bool(dispatch_batches) and processes > 1
    dataset, sampler, size = dataloader.dataset, get_sampler(dataloader), dataloader.batch_size
    if slice_fn_for_dispatch is not None and not dispatch_batches:
        raise ValueError("slice_fn_for_dispatch goes with dispatch_batches=True")
    seeded: list[tuple[torch.Generator, int]] = []
    changes: dict[str, Any] = {"collate_fn": _Collate(dataset, dataloader.collate_fn)}
    if isinstance(dataset, IterableDataset):
        split = split_batches and size is not None
        seed = _order_seed(dataset.generator, data_seed) if hasattr(dataset, "generator") else 0
        dataset = IterableDatasetShard(dataset, size or 1, dataloader.drop_last, processes, rank, split)
        dataset.seed, dataset.even_batches, dataset.tags_tail, dataset.whole = seed, even_batches, True, dispatch
        dataset.share *= processes if dispatch else 1
        shards, changes["batch_size"] = None, size and dataset.share
    elif isinstance(sampler, DistributedEvalSampler) and not dispatch:
        if size is None:
            raise ValueError("a loader with a DistributedEvalSampler needs a batch size")
        shards = EvalBatches(dataloader.batch_sampler)
    elif isinstance(sampler, (DistributedSampler, DistributedEvalSampler)) and processes > 1:
        raise ValueError("preparing a loader with a DistributedSampler would shard the data twice: leave it out")
    else:
        batches, changes = _reproducible(_batches_of(dataloader), data_seed, seeded), {}
        shards = BatchSamplerShard(batches, processes, rank, split_batches, even_batches)
        shards.whole = dispatch
    if dispatch and (shards or dataloader).batch_size is None:
        raise ValueError("dispatch_batches needs a batch size")
    prepared = (DataLoaderDispatcher if dispatch else DataLoaderShard)(
        dataset,
        device=device if put_on_device else None,
        rng_types=[kind for kind in rng_types or () if kind != "generator"],
        _non_blocking=non_blocking,
        generator=torch.Generator(),
        **(_loading(dataloader, shards) | changes),
    )
    prepared._seeded, prepared.slice_fn = seeded, slice_fn_for_dispatch
    prepared._worker_seed = torch.initial_seed() if data_seed is None else data_seed, rank
    return prepared


def _order_seed(generator: torch.Generator | None, data_seed: int | None) -> int:
    if data_seed is not None:
        return data_seed
    return broadcast_object_list([torch.initial_seed() if generator is None else generator.initial_seed()])[0]


def _reproducible(sampler: Any, data_seed: int | None, seeded: list[tuple[torch.Generator, int]]) -> Any:
    """`sampler`, or a copy whose random draws are a function of seed and epoch; new generators go into `seeded`."""
    if type(sampler) is RandomSampler:
        seed = _order_seed(sampler.generator, data_seed)
        return SeedableRandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, data_seed=seed)
    changes = {}
    if hasattr(sampler, "generator"):
        changes["generator"] = torch.Generator()
        seeded.append((changes["generator"], _order_seed(sampler.generator, data_seed)))
    if isinstance(inner := getattr(sampler, "sampler", None), Sampler):
        changes["sampler"] = _reproducible(inner, data_seed, seeded)
    if changes:
        sampler = copy.copy(sampler)
        vars(sampler).update(changes)
    return sampler


def _loading(dataloader: DataLoader, shards: Any) -> dict[str, Any]:
    """How `dataloader` loads, as arguments for a loader of `shards`: a batch sampler, a sampler or (None) a stream."""
    kept = "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor"
    kwargs = {name: getattr(dataloader, name) for name in (*kept.split(), "persistent_workers")}
    if shards is None:
        return kwargs | {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return kwargs | {"sampler": shards, "batch_size": None}
    return kwargs | {"batch_sampler": shards}


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """A loader of the epochs of `dataloader` without their first `num_batches` batches.

    Of a prepared loader it takes over the epoch; where a checkpoint made that loader resume in the middle of an epoch,
    `num_batches`, counted from the start of the epoch, replaces that position.
    """
    streaming = isinstance(dataloader.dataset, IterableDataset)
    if not isinstance(dataloader, DataLoaderShard):
        if streaming:
            return DataLoaderShard(dataloader.dataset, skip_batches=num_batches, **_loading(dataloader, None))
        shards = SkipBatchSampler(_batches_of(dataloader), num_batches)
        return DataLoader(dataloader.dataset, generator=dataloader.generator, **_loading(dataloader, shards))
    skipping = copy.copy(dataloader)
    if not streaming:
        name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        vars(skipping)[name] = copy.copy(dataloader.shards)
    vars(skipping).update(_iterator=None, skip_batches=dataloader.skip_batches + num_batches)
    return skipping
