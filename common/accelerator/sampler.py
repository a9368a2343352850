"""Which samples, in which order, on which process: samplers and what they are asked, without collectives.

A *step* is what all processes get in one turn of their loops: one batch each. Most steps have a full batch on every
process. In a *short step* there are too few samples for that, so some of them are repeated, or some processes get less.
A ShortStep says which samples are real.

An example: two processes share the samples 0 to 4 in batches of two. Step 0 is `[0 1]` and `[2 3]`. For step 1 only
sample 4 is left, and with samples from the beginning it becomes `[4 0]` and `[1 2]`. `gather_for_metrics` gathers
`[4 0 1 2]`, and keeps the first `short_step.num_real_all_ranks` = 1 of them. On process 0, BatchSamplerShard makes
`Step([4, 0], ShortStep(rows=(2, 2), num_real_all_ranks=1))`. A Reader keeps it while torch's loader reads.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from common.eval_sampler import DistributedEvalSampler


class ShortStep(NamedTuple):
    """Real and repeated samples of a step in which not all processes are known to have full batches of their own.

    On several processes, batches without a known size have one in every step. A stream that one process reads without
    dispatching has none.

    Attributes:
        rows: samples in the batch of each process that has one, lowest ranks first; the repeated ones count too.
        num_real_all_ranks: how many of all these samples are real: the first ones, in rank order. The others were
            repeated to fill up the batches.
    """

    rows: tuple[int, ...]
    num_real_all_ranks: int

    def num_real(self, rank: int) -> int:
        left = self.num_real_all_ranks - sum(self.rows[:rank])
        return min(max(left, 0), self.rows[rank])


class Step(NamedTuple):
    """A process's part of a step, or a whole one to dispatch: sample numbers, samples of a stream, or their batch."""

    content: Any
    short_step: ShortStep | None


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is a function of seed and epoch: its generator is seeded with their sum.

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


class BatchSamplerShard(BatchSampler):
    """The batches of `batch_sampler` that belong to one process.

    The shares of one step, in rank order, are consecutive samples of the global order. For two processes and the
    batches `[0 1 2 3] [4 5 6 7] [8 9]`:

    mode                        process 0                       process 1
    whole batches (default)     `[0 1 2 3]`, `[8 9 0 1]`        `[4 5 6 7]`, `[2 3 4 5]`
    … `even_batches=False`      `[0 1 2 3]`, `[8 9]`            `[4 5 6 7]`
    `split_batches=True`        `[0 1]`, `[4 5]`, `[8 9]`       `[2 3]`, `[6 7]`, `[0 1]`
    … `even_batches=False`      `[0 1]`, `[4 5]`, `[8 9]`       `[2 3]`, `[6 7]`

    If there are too few samples for the last step, `even_batches` fills it up with the first samples of the epoch.
    Without `even_batches` the last processes get less of it, or nothing. With the batch sampler's `drop_last` the step
    is dropped. A batch sampler without a `batch_size`, whose batches may differ in size, is sharded in whole batches.
    Then `even_batches` repeats whole ones: after `[0 1 2] [3]`, the last step `[4 5]` becomes `[4 5] [0 1 2]`.

    Args:
        split_batches: every process gets an equal part of each batch, instead of whole batches in turn.
        even_batches: repeat samples so that all processes make equally many full steps.

    Raises:
        ValueError: if `split_batches` cannot split the batch size evenly. While iterating, with either option, if a
            batch is larger than the batch size; with `even_batches`, if one that is not the last is smaller.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            check_split(self.batch_size, num_processes)

    @property
    def batch_size(self) -> Any:  # type: ignore[override]  # BatchSampler has an attribute
        """That of the batch sampler, which the script may change between two passes; None if it has none."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def samples_per_process(self) -> Any:
        """Samples of each process in a full step; None if the batch sampler has no `batch_size`."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __iter__(self) -> Iterator[list]:
        for step in self.steps():
            yield step.content

    def steps(self) -> Iterator[Step]:
        """The batches of this process, each with what is known of its step."""
        size = self.samples_per_process
        first_step: list = []
        whole_steps = self._parts_of_batches() if self.split_batches else self._groups_of_batches()
        for batches in whole_steps:
            first_step = first_step or batches
            rows = [len(batch) for batch in batches]
            shares = batches
            short_step = None
            if size is None or rows != [size] * self.num_processes:
                if self.even_batches and size is not None:
                    shares = self._filled_up(batches, first_step)
                elif self.even_batches:  # It is not known how many samples are missing, so whole batches are repeated.
                    shares = list(islice(chain(batches, cycle(first_step)), self.num_processes))
                short_step = ShortStep(tuple(map(len, shares)), num_real_all_ranks=sum(rows))
            if self.process_index < len(shares):
                yield Step(shares[self.process_index], short_step)

    def _parts_of_batches(self) -> Iterator[list]:
        """For each step one batch, in equal parts for the processes: `[0 1 2 3]` becomes `[0 1] [2 3]`."""
        check_split(self.batch_size, self.num_processes)  # the script may have changed it
        size = self.samples_per_process
        for batch in self._batches_of_one_size():
            yield [batch[begin : begin + size] for begin in range(0, len(batch), size)]

    def _groups_of_batches(self) -> Iterator[list]:
        """For each step one batch for each process, in rank order."""
        batches = self.batch_sampler
        if self.even_batches and self.batch_size is not None:
            batches = self._batches_of_one_size()
        for group in groups_of(batches, self.num_processes):
            if len(group) == self.num_processes or not self.drop_last:
                yield group

    def _batches_of_one_size(self) -> Iterator[list]:
        """All batches, without a smaller one that `drop_last` drops. Raise a ValueError where they cannot be shared."""
        is_small = False
        for batch in self.batch_sampler:
            # The batch before must have been a full one, or dropped: only the last one can be filled up, or be short.
            if len(batch) > self.batch_size or (is_small and (self.even_batches or not self.drop_last)):
                raise ValueError("batches of different sizes need even_batches=False, without split_batches")
            is_small = len(batch) < self.batch_size
            if not (is_small and self.drop_last):
                yield batch

    def _filled_up(self, batches: list, first_step: list) -> list:
        """The samples of `batches` and then of the first step, in full batches for all processes."""
        first_samples = chain(*first_step)
        samples = chain(*batches, cycle(first_samples))
        return [list(islice(samples, self.samples_per_process)) for _ in range(self.num_processes)]

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return self._length_of_parts(total)
        whole_steps, extra_batches = divmod(total, self.num_processes)
        if self.drop_last:
            return whole_steps
        has_last_step = extra_batches > 0 if self.even_batches else self.process_index < extra_batches
        return whole_steps + 1 if has_last_step else whole_steps

    def _length_of_parts(self, total: int) -> int:
        if self.drop_last or self.even_batches or total == 0:
            return total
        if type(self.batch_sampler) is not BatchSampler:
            return total  # As in the original: it is not known how many samples the last batch has.
        sampler: Any = self.batch_sampler.sampler
        in_last_batch = len(sampler) - (total - 1) * self.batch_size
        before_this_process = self.process_index * self.samples_per_process
        return total - 1 if in_last_batch <= before_this_process else total


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`. As the original's, it has no `batch_size`."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list]:
        yield from islice(self.batch_sampler, self.skip_batches, None)

    def steps(self) -> Iterator[Step]:
        yield from islice(steps_of(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


def groups_of(batches: Iterable[Any], size: int) -> Iterator[list]:
    """Lists of `size` batches, read when they are asked for; the last list may have fewer."""
    batches = iter(batches)
    while group := list(islice(batches, size)):
        yield group


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Raise ValueError if a batch of that size cannot be divided by so many processes."""
    if batch_size is None or batch_size % num_processes:
        raise ValueError(f"split_batches needs a batch size that {num_processes} processes can split, not {batch_size}")


def steps_of(batches: Any) -> Iterator[Step]:
    """The steps of a process that reads by `batches`: batches of sample numbers or, for `batch_size=None`, single ones.

    It is no generator: `iter` of a script's own sampler is called here, and may draw. Those of this file draw at the
    first step, see `Reader`.
    """
    if type(batches) in (BatchSamplerShard, SkipBatchSampler):  # A script's subclass may have another `__iter__`.
        return batches.steps()
    return _steps_of_one_process(iter(batches), getattr(batches, "batch_size", None))


def _steps_of_one_process(batches: Iterator[Any], full_size: int | None) -> Iterator[Step]:
    """Each batch as a step: a short one if it has not the full size. It may also be a single number, or an iterator."""
    for batch in batches:
        short_step = None
        if full_size is not None and hasattr(batch, "__len__") and len(batch) != full_size:
            short_step = ShortStep(rows=(len(batch),), num_real_all_ranks=len(batch))
        yield Step(batch, short_step)


def index_sampler_of(dataloader: DataLoader) -> Any:
    """The sampler that the loader reads by: the batch sampler or, in a loader with `batch_size=None`, the sampler."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def sampler_chain(sampler: Any) -> list:
    """`sampler`, what it draws from, and so on. The last one draws the sample numbers.

    For example, `sampler_chain(index_sampler_of(loader))` of a shuffled loader, prepared on several processes:

        BatchSamplerShard   the loader reads by it
        BatchSampler        the script's
        RandomSampler       draws the sample numbers; `get_sampler(loader)` is this one
    """
    samplers = []
    while sampler is not None:
        samplers.append(sampler)
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return samplers


def epoch_listeners(dataloader: DataLoader, num_skip_samplers: int) -> list:
    """Those that the original tells the epoch when a pass begins. A script may tell another one to the others.

    It looks at the two outermost batch samplers, and each call of `skip_first_batches` puts a SkipBatchSampler around
    them. It has no sampler and no `set_epoch`, so it stands for None here. Where the second one's sampler has no
    `set_epoch` either, the data set is told. A SeedableRandomSampler is told wherever it is.
    """
    samplers = sampler_chain(index_sampler_of(dataloader))
    seedable: list[Any] = [sampler for sampler in samplers if isinstance(sampler, SeedableRandomSampler)]
    batch_sampler: Any = dataloader.batch_sampler
    layers: list[Any] = [None] * num_skip_samplers + [batch_sampler, getattr(batch_sampler, "batch_sampler", None)]
    outer, inner = layers[:2]
    innermost = getattr(inner, "sampler", None)
    if seedable and isinstance(inner, BatchSamplerShard):
        innermost = seedable[0]  # The original's shard has it as its `sampler`.
    last = innermost if hasattr(innermost, "set_epoch") else dataloader.dataset
    return [*seedable, outer, getattr(outer, "sampler", None), last]


def get_sampler(dataloader: DataLoader) -> Any:
    """The attribute `sampler` of the script's batch sampler; None where there is none. This is for scripts."""
    index_sampler = index_sampler_of(dataloader)
    if isinstance(index_sampler, BatchSamplerShard):
        index_sampler = index_sampler.batch_sampler
    return getattr(index_sampler, "sampler", None)


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of torch that `sampler` draws from, if any. Generators of NumPy and of `random` do not count."""
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def follows_from_epoch(samplers: list) -> bool:
    """True if the order of a `sampler_chain` is known to be sequential, or a function of a seed and the epoch."""
    *wrappers, sampler = samplers
    known = (SequentialSampler, SeedableRandomSampler, DistributedSampler, DistributedEvalSampler, list, tuple, range)
    # These make batches of what they are given, and draw nothing by themselves. A script's own class may draw.
    group_in_order = all(type(wrapper) in (BatchSampler, BatchSamplerShard, SkipBatchSampler) for wrapper in wrappers)
    return group_in_order and type(sampler) in known
