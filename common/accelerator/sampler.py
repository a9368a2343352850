"""Which samples, in which order, on which process: arithmetic on indices, without data and without collectives."""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class PartialStep(NamedTuple):
    """What a process has in a step in which some process lacks samples of its own.

    In all other steps every process has a whole batch, and all of its samples are real.

    Attributes:
        num_real: how many samples of this process's batch are real: the first ones. The others were repeated to fill
            the batch. None: all of them, in a batch whose rows are not known because the data set made it.
        rows: samples in this process's batch, the repeated ones too; None where they are not known.
        num_ranks_present: how many processes, lowest ranks first, have a batch in this step.
        num_real_all_ranks: real samples of all processes in this step; None where they are not known.
    """

    num_real: int | None
    rows: int | None
    num_ranks_present: int
    num_real_all_ranks: int | None = None

    def of_unknown_rows(self) -> "PartialStep":
        """The same step, for samples that are batches of the data set's: nobody knows how many rows they have."""
        # A whole batch is either real or a repetition.
        num_real = None if self.num_real else 0
        return PartialStep(num_real=num_real, rows=None, num_ranks_present=self.num_ranks_present)


class Share(NamedTuple):
    """What one process gets in one step: its batch of sample numbers and, in a partial step, what is real of it."""

    batch: list
    partial: PartialStep | None = None


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of torch that `sampler` draws from, if any. Generators of NumPy and of `random` do not count."""
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


class GeneratorStates(NamedTuple):
    """The states of the generators from which an epoch's order is drawn.

    Attributes:
        torch: of torch's generator on the CPU.
        sampler: of the sampler's own generator; None where it has none and draws from torch's.
    """

    torch: torch.Tensor
    sampler: torch.Tensor | None

    @classmethod
    def now(cls, sampler: Any) -> "GeneratorStates":
        """The states at this moment, for `sampler`."""
        generator = generator_of(sampler)
        own = None if generator is None else generator.get_state()
        return cls(torch.get_rng_state(), own)


class SavedGenerators:
    """The states that `generators` have now, to be put back later."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._states = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


class Redraw:
    """Draws the order of an interrupted epoch again, and leaves the generators as they are now.

    Args:
        sampler: what draws the order.
        rng_before_order: the states from which the order was drawn. If they are not known (None), another order is
            drawn.
        generators: those that are put back to their present state when the order has been drawn.
    """

    def __init__(
        self, sampler: Any, rng_before_order: GeneratorStates | None, generators: Iterable[torch.Generator]
    ) -> None:
        self.sampler = sampler
        self.rng_before_order = rng_before_order
        self.present_states = SavedGenerators(generators)
        self.own_generator = generator_of(sampler)
        self.ended = False

    def begin(self) -> None:
        """Put the generators into the states from which the order was drawn."""
        if self.rng_before_order is None:
            return
        torch.set_rng_state(self.rng_before_order.torch)
        if self.rng_before_order.sampler is not None and self.own_generator is not None:
            self.own_generator.set_state(self.rng_before_order.sampler)
        elif self.own_generator is not None:
            # The order was drawn by a sampler without a generator, as in a run of one process.
            self.sampler.generator = None

    def end(self) -> None:
        """Put the generators back to where they were when this object was made. Further calls do nothing."""
        if self.ended:
            return
        self.ended = True
        if self.own_generator is not None:
            self.sampler.generator = self.own_generator
        self.present_states.restore()


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is a function of seed and epoch: `torch.randperm(n)` seeded with their sum.

    Args:
        args, kwargs: of RandomSampler. A `generator` is used and seeded anew for each epoch.
        data_seed: the seed; by default `torch.initial_seed()`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`; each full pass moves on to the next by itself."""
        self.epoch = epoch


class PassRecord:
    """What is known of one pass over the batches, as far as its batches have been drawn.

    Attributes:
        rng_before_order: the states of the generators right before the order was drawn; None until then.
        partial_steps: the partial steps, by their number in the epoch (from 0).
        last_step: the number of this process's last step; None until that step is yielded.
    """

    def __init__(self) -> None:
        self.rng_before_order: GeneratorStates | None = None
        self.partial_steps: dict[int, PartialStep] = {}
        self.last_step: int | None = None


class PassStart(NamedTuple):
    """Where a pass over the batches begins.

    Attributes:
        first_batch: the number of the first batch that the pass yields.
        redraw: draws the order that was drawn before; None draws a new one.
        batches_drawn_ahead: how many batches after `first_batch` had also been drawn when the epoch was interrupted.
            The generators are put back after these.
    """

    first_batch: int = 0
    redraw: Redraw | None = None
    batches_drawn_ahead: int = 0


class ReplayableBatches(BatchSampler):
    """Batches of an order that can be drawn again.

    Subclasses say in `shares` what this process gets in every step.

    Attributes:
        latest_pass: the PassRecord of the pass that began last; None before the first one.
    """

    num_processes = 1
    split_batches = False

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.latest_pass: Any = None
        self._next_pass = PassStart()

    @property
    def batch_size(self) -> Any:
        """That of the batch sampler, which the script may change between two passes; None if it has none."""
        return getattr(self.batch_sampler, "batch_size", None)

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> None:
        self.batch_sampler.batch_size = batch_size

    @property
    def sampler(self) -> Any:
        """What draws the sample numbers, under the batch samplers."""
        return innermost_sampler(self.batch_sampler)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        inner = self.batch_sampler
        while hasattr(inner, "batch_sampler"):
            inner = inner.batch_sampler
        inner.sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    @property
    def takes_all(self) -> bool:
        """Whether this process takes every batch, as in a loader that was not prepared."""
        return False

    def shares(self, batches: Iterable[Any], start: int) -> Iterator[Share]:
        """This process's share of each step of `batches`, from step number `start` on."""
        raise NotImplementedError

    def start_next_pass(self, start: PassStart) -> None:
        """Say where the next pass begins. `__iter__` cannot be told, because DataLoader calls it without arguments."""
        self._next_pass = start

    def __iter__(self) -> Iterator[list]:
        # The order of random draws must equal the original's: some batch samplers draw when their iterator is made.
        # One process: DataLoader makes the batch sampler's iterator first, then it draws a seed for its workers.
        # Several processes: the seed is drawn first, so the iterator is made later, in `_iterate`.
        if self.takes_all:
            return self._iterate(iter(self.batch_sampler))
        return self._iterate(self.batch_sampler)

    def _iterate(self, batches: Iterable[Any]) -> Iterator[list]:
        """The batches of one pass for this process, where `batches` are those of all processes."""
        self.latest_pass = PassRecord()
        for _, share in self._numbered_shares(batches, self.latest_pass):
            yield share.batch

    def _numbered_shares(self, batches: Iterable[Any], record: PassRecord) -> Iterator[tuple[int, Share]]:
        """The shares of a pass with their numbers. `record` gets the states of the generators before the order."""
        start = self._next_pass
        self._next_pass = PassStart()
        numbered = enumerate(self.shares(batches, start.first_batch), start.first_batch)
        if start.redraw is None:
            record.rng_before_order = GeneratorStates.now(self.sampler)
            yield from numbered
            return
        start.redraw.begin()
        record.rng_before_order = GeneratorStates.now(self.sampler)
        try:
            for number, share in numbered:
                if number == start.first_batch + start.batches_drawn_ahead:
                    start.redraw.end()
                yield number, share
        finally:
            start.redraw.end()


class ShardedBatches(ReplayableBatches):
    """One process's batches, drawn one step ahead, so that the last one is known when it is yielded."""

    def _iterate(self, batches: Iterable[Any]) -> Iterator[list]:
        # The loader may begin another pass within this one, and `self.latest_pass` is then the record of that one.
        record = PassRecord()
        self.latest_pass = record
        ahead: list | None = None
        step = 0
        for step, share in self._numbered_shares(batches, record):
            if ahead is not None:
                yield ahead
            ahead = share.batch
            if share.partial is not None:
                record.partial_steps[step] = share.partial
        if ahead is not None:
            record.last_step = step
            yield ahead


class BatchSamplerShard(ShardedBatches):
    """The batches of `batch_sampler` that belong to one process.

    The shares of one step, in rank order, are consecutive samples of the global order. For two processes and the
    batches `[0 1 2 3] [4 5 6 7] [8 9]`:

    ==========================  ==============================  ==============================
    mode                        process 0                       process 1
    ==========================  ==============================  ==============================
    whole batches (default)     `[0 1 2 3]`, `[8 9 0 1]`        `[4 5 6 7]`, `[2 3 4 5]`
    … `even_batches=False`      `[0 1 2 3]`, `[8 9]`            `[4 5 6 7]`
    `split_batches=True`        `[0 1]`, `[4 5]`, `[8 9]`       `[2 3]`, `[6 7]`, `[0 1]`
    … `even_batches=False`      `[0 1]`, `[4 5]`, `[8 9]`       `[2 3]`, `[6 7]`
    ==========================  ==============================  ==============================

    If there are too few samples for the last step, `even_batches` fills it up with the first samples of the epoch.
    Without `even_batches` the last processes get less of it, or nothing. With the batch sampler's `drop_last` the step
    is dropped. A batch sampler without a `batch_size`, whose batches may differ in size, is sharded in whole batches.

    Args:
        batch_sampler: the batches of all processes.
        num_processes: how many processes share them.
        process_index: whose share this is.
        split_batches: every process gets an equal part of each batch, instead of whole batches in turn.
        even_batches: repeat samples so that all processes make equally many full steps.

    Raises:
        ValueError: if `split_batches` cannot split the batch size evenly; while iterating with `even_batches`, if a
            batch that is not the last one has another size.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        size = self.batch_size
        if split_batches and (size is None or size % num_processes):
            raise ValueError(f"split_batches needs a batch size that {num_processes} processes can split, not {size}")

    @property
    def takes_all(self) -> bool:
        return self.num_processes == 1 and not self.even_batches

    def shares(self, batches: Iterable[Any], start: int) -> Iterator[Share]:
        if self.takes_all:
            return self._all_batches(batches, start)
        if self.split_batches:
            return self._parts_of_batches(batches, start)
        if self.batch_size is None:
            return self._batches_of_any_size(batches, start)
        return self._whole_batches(batches, start)

    def _all_batches(self, batches: Iterable[list], start: int) -> Iterator[Share]:
        """Step k is batch k, of a single process."""
        for batch in islice(batches, start, None):
            rows = len(batch)
            if self.batch_size is None or rows == self.batch_size:
                yield Share(batch)
            else:
                yield Share(batch, PartialStep(num_real=rows, rows=rows, num_ranks_present=1, num_real_all_ranks=rows))

    def _parts_of_batches(self, batches: Iterable[list], start: int) -> Iterator[Share]:
        """Step k is batch k. Process r takes the r-th of its equal parts."""
        size = self.batch_size // self.num_processes
        first_batch: list = []
        for step, batch in enumerate(self._check_sizes(batches)):
            if step == 0:
                first_batch = batch
            if step < start:
                continue
            if len(batch) == self.batch_size:
                part = slice(self.process_index * size, (self.process_index + 1) * size)
                yield Share(batch[part])
            elif self.drop_last:
                return
            elif self.even_batches:
                yield self._filled_share(batch, first_batch, size)
            else:
                parts = [batch[at : at + size] for at in range(0, len(batch), size)]
                yield from self._own_batch_of(parts, num_ranks_present=len(parts))

    def _whole_batches(self, batches: Iterable[list], start: int) -> Iterator[Share]:
        """Step k is the batches from k·num_processes on. Process r takes the r-th of them."""
        first_samples: list = []
        for step, group in enumerate(self._groups(batches)):
            if step == 0:
                first_samples = list(chain(*group))
            if step < start:
                continue
            samples = sum(map(len, group))
            if samples == self.num_processes * self.batch_size:
                yield Share(group[self.process_index])
            elif self.drop_last and (self.even_batches or len(group) < self.num_processes):
                # Without `even_batches` batches may differ in size: only a step that lacks whole batches is dropped.
                return
            elif self.even_batches:
                yield self._filled_share(list(chain(*group)), first_samples, self.batch_size)
            else:
                yield from self._own_batch_of(group, num_ranks_present=len(group))

    def _batches_of_any_size(self, batches: Iterable[list], start: int) -> Iterator[Share]:
        """Like `_whole_batches`, but the last step is filled up with whole batches from the first step."""
        first_group: list = []
        for step, group in enumerate(self._groups(batches)):
            if step == 0:
                first_group = group
            if step < start:
                continue
            missing = self.num_processes - len(group)
            if missing and self.drop_last:
                return
            if not self.even_batches or self.process_index < len(group):
                num_ranks_present = self.num_processes if self.even_batches else len(group)
                yield from self._own_batch_of(group, num_ranks_present)
            else:
                repeated = next(islice(cycle(first_group), self.process_index - len(group), None))
                partial = PartialStep(
                    num_real=0,
                    rows=len(repeated),
                    num_ranks_present=self.num_processes,
                    num_real_all_ranks=sum(map(len, group)),
                )
                yield Share(repeated, partial)

    def _own_batch_of(self, group: list[list], num_ranks_present: int) -> Iterator[Share]:
        """This process's batch of a step in which nothing is repeated; none, if the step has too few batches."""
        if self.process_index < len(group):
            own = group[self.process_index]
            partial = PartialStep(
                num_real=len(own),
                rows=len(own),
                num_ranks_present=num_ranks_present,
                num_real_all_ranks=sum(map(len, group)),
            )
            yield Share(own, partial)

    def _filled_share(self, samples: list, first: list, size: int) -> Share:
        """This process's `size` samples of a step that has only `samples` and is filled up from `first`."""
        missing = self.num_processes * size - len(samples)
        filled = samples + list(islice(cycle(first), missing))
        begin = self.process_index * size
        partial = PartialStep(
            num_real=min(max(len(samples) - begin, 0), size),
            rows=size,
            num_ranks_present=self.num_processes,
            num_real_all_ranks=len(samples),
        )
        return Share(filled[begin : begin + size], partial)

    def _groups(self, batches: Iterable[list]) -> Iterator[list[list]]:
        """The batches of each step; the last group may have fewer batches than there are processes."""
        group: list[list] = []
        for batch in self._check_sizes(batches):
            group.append(batch)
            if len(group) == self.num_processes:
                yield group
                group = []
        if group:
            yield group

    def _check_sizes(self, batches: Iterable[list]) -> Iterator[list]:
        """Yield all of `batches`. With `even_batches`, raise a ValueError if any but the last has another size."""
        must_be_last = False
        for batch in batches:
            if must_be_last:
                raise ValueError("batches of different sizes need even_batches=False")
            must_be_last = self.even_batches and self.batch_size is not None and len(batch) != self.batch_size
            yield batch

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return self._length_of_parts(total)
        whole_steps, extra_batches = divmod(total, self.num_processes)
        if self.drop_last:
            return whole_steps
        if self.even_batches:
            return whole_steps + (extra_batches > 0)
        return whole_steps + (self.process_index < extra_batches)

    def _length_of_parts(self, total: int) -> int:
        if self.drop_last or self.even_batches or total == 0:
            return total
        if type(self.batch_sampler) is not BatchSampler:
            return total  # as in the original: only the batch sampler knows how many samples its last batch has
        sampler: Any = self.batch_sampler.sampler
        in_last_batch = len(sampler) - (total - 1) * self.batch_size
        before_this_process = self.process_index * (self.batch_size // self.num_processes)
        return total - (in_last_batch <= before_this_process)


class SampleShard(BatchSamplerShard):
    """The samples of `sampler` that belong to one process, one at a time: for loaders with `batch_size=None`.

    A sample of such a data set may be a whole batch. How many rows it has is not known here.
    """

    def __init__(self, sampler: Any, num_processes: int = 1, process_index: int = 0, even_batches: bool = True) -> None:
        singles = BatchSampler(sampler, batch_size=1, drop_last=False)
        super().__init__(singles, num_processes, process_index, even_batches=even_batches)

    def shares(self, batches: Iterable[Any], start: int) -> Iterator[Share]:
        for share in super().shares(batches, start):
            if share.partial is None:
                yield share
            else:
                yield Share(share.batch, share.partial.of_unknown_rows())

    def _iterate(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in super()._iterate(batches):
            yield batch[0]


class AllBatches(ReplayableBatches):
    """The batches of all processes, for the process that loads for the others: as they come, without looking ahead."""

    @property
    def takes_all(self) -> bool:
        return True

    def shares(self, batches: Iterable[Any], start: int) -> Iterator[Share]:
        return map(Share, islice(batches, start, None))

    def __len__(self) -> int:
        return len(self.batch_sampler)


class EvalBatches(ShardedBatches):
    """The batches that `batch_sampler` makes of a DistributedEvalSampler, in equally many steps on every process.

    Where this process has no sample left and another has, the batch is empty: a forward through DDP, or any other
    collective in the loop, is then called on all of them.
    """

    def __init__(self, batch_sampler: Any) -> None:
        super().__init__(batch_sampler)
        self.num_processes = batch_sampler.sampler.num_replicas

    def shares(self, batches: Iterable[Any], start: int) -> Iterator[Share]:
        own = islice(batches, start, None)
        for _ in range(start, len(self)):
            batch: list = next(own, [])
            partial = PartialStep(num_real=len(batch), rows=len(batch), num_ranks_present=self.num_processes)
            yield Share(batch, partial if self.num_processes > 1 else None)

    def __len__(self) -> int:
        most_samples = math.ceil(len(self.batch_sampler.sampler.dataset) / self.num_processes)
        if self.drop_last:
            return most_samples // self.batch_size
        return math.ceil(most_samples / self.batch_size)


def sampler_chain(sampler: Any) -> Iterator[Any]:
    """`sampler`, what it draws from, and so on."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        if inner is None:
            inner = getattr(sampler, "sampler", None)
        sampler = inner


def innermost_sampler(sampler: Any) -> Any:
    """The last of `sampler_chain`: what draws the sample numbers."""
    return list(sampler_chain(sampler))[-1]


# Samplers that draw the whole order of an epoch when it begins, from their own generator, torch's or a seed.
_DRAWN_AT_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


def _groups_in_order(wrapper: Any) -> bool:
    """Whether `wrapper` makes batches of what it is given, and draws nothing by itself."""
    return isinstance(wrapper, ReplayableBatches) or type(wrapper) is BatchSampler


def can_be_redrawn(batch_sampler: Any) -> bool:
    """Whether the order of `batch_sampler` is known to be drawn from torch's generators when an epoch begins.

    A sampler of the script's own may draw from elsewhere, or while the epoch goes on.
    """
    *wrappers, sampler = sampler_chain(batch_sampler)
    known_wrappers = all(map(_groups_in_order, wrappers))
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return False
    return known_wrappers and isinstance(sampler, (*_DRAWN_AT_ONCE, DistributedEvalSampler, Sequence))


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list]:
        return islice(self.batch_sampler, self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches, the skipped ones too."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class DistributedEvalSampler(Sampler[int]):
    """Every sample exactly once over all ranks: rank r visits r, r + world size, r + 2·world size, …

    `torch.utils.data.DistributedSampler` repeats samples until every rank has equally many, so that an accuracy over
    10000 samples on 3 ranks becomes one over 10002. This sampler pads nothing: the first `n % num_replicas` ranks
    visit one sample more than the others, and with fewer samples than ranks some ranks visit none. Memory is O(1)
    unless `shuffle` is set.

    For evaluation only. A forward and backward through DDP is a collective; ranks that get one batch more than the
    others would wait in it for ever.

    Args:
        dataset: anything with a length.
        num_replicas: the number of shards; by default the world size (1 without a process group).
        rank: the shard to visit, 0 <= rank < num_replicas; by default this process's rank.
        shuffle: visit in the order of `torch.randperm(n)` seeded with `seed + epoch`, the same on every rank.
        seed: of the shuffled order; must be equal on all ranks.

    Raises:
        ValueError: if `rank` is not in [0, num_replicas) or `num_replicas` is not positive.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if distributed else 1
        if rank is None:
            rank = dist.get_rank() if distributed else 0
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not one of {num_replicas} replicas: need 0 <= rank < num_replicas")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        n = len(self.dataset)
        if not self.shuffle:
            return iter(range(self.rank, n, self.num_replicas))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(n, generator=generator)[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffled order of `epoch`; without `shuffle` nothing changes."""
        self.epoch = epoch
