"""Which samples, in which order, on which process: arithmetic on indices, without data and without collectives.

Most steps have a full batch on every process. In a *short step* there are too few samples for that, so some of them
are repeated, or some processes get less. A ShortStep says which samples are real.

An example: two processes share the samples 0 to 4 in batches of two. Step 0 is `[0 1]` and `[2 3]`. For step 1 only
sample 4 is left, and with samples from the beginning it becomes `[4 0]` and `[1 2]`. `gather_for_metrics` gathers
`[4 0 1 2]`, and keeps the first `short_step.num_real_all_ranks` = 1 of them. This is the way of the ShortStep on
process 0:

    BatchSamplerShard   makes Step([4, 0], ShortStep(rank=0, rows=(2, 2), real=(1, 0)))
    PassSampler         gives [4, 0] to torch's loader, which handles nothing but samples, and keeps the ShortStep
    torch's loader      reads the two samples and collates them to tensor([4, 0])
    DataLoaderShard     joins the two again to Step(tensor([4, 0]), …), yields the tensor, and has the other as
                        `loader.short_step`
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from common.eval_sampler import DistributedEvalSampler


class ShortStep(NamedTuple):
    """Real and repeated samples of a step in which some process lacks samples of its own.

    In all other steps every process has a full batch, all of its samples are real, and there is no ShortStep.

    Attributes:
        rank: the process whose batch `own_rows` and `num_real` are about.
        rows: samples in the batch of each process that has one, lowest ranks first; the repeated ones count too.
        real: how many of these samples are real: the first ones. The others were repeated to fill the batch.
    """

    rank: int
    rows: tuple[int, ...]
    real: tuple[int, ...]

    @classmethod
    def filled(cls, num_real_all_ranks: int, rows: int, rank: int, num_ranks: int) -> "ShortStep":
        """A step of so few real samples that is filled up to `rows` on each of `num_ranks` processes."""
        real = [min(max(num_real_all_ranks - each * rows, 0), rows) for each in range(num_ranks)]
        return cls(rank, (rows,) * num_ranks, tuple(real))

    @property
    def own_rows(self) -> int:
        """Samples in this process's batch."""
        return self.rows[self.rank]

    @property
    def num_real(self) -> int:
        """Real samples in this process's batch."""
        return self.real[self.rank]

    @property
    def num_real_all_ranks(self) -> int:
        """Real samples of all processes in this step."""
        return sum(self.real)

    @property
    def num_ranks_present(self) -> int:
        """Processes that have a batch in this step."""
        return len(self.rows)

    @property
    def is_even(self) -> bool:
        """True if all processes that have a batch have equally large ones."""
        return len(set(self.rows)) == 1


class Step(NamedTuple):
    """One process's part of a step: sample numbers or a batch, and the ShortStep, None in a step of full batches."""

    content: Any
    short_step: ShortStep | None


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


class BatchSamplerShard(BatchSampler):
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

    @property
    def _fills_up_samples(self) -> bool:
        """True if single samples are repeated. Without a `batch_size` it is not known how many are missing."""
        return self.even_batches and self.batch_size is not None

    def __iter__(self) -> Iterator[list]:
        for step in self.steps():
            yield step.content

    def steps(self) -> Iterator[Step]:
        """The batches of this process, each with what is known of its step."""
        size = self.samples_per_process
        must_be_full = self.split_batches or self._fills_up_samples  # In other modes batches may have any size.
        first_step: list = []
        steps = self._parts_of_batches() if self.split_batches else groups_of(self._batches(), self.num_processes)
        for batches in steps:
            if not first_step:
                first_step = batches
            is_complete = len(batches) == self.num_processes
            if is_complete and all(len(batch) == size for batch in batches):
                yield Step(batches[self.process_index], None)
            elif self.drop_last and (must_be_full or not is_complete):
                return  # The step lacks samples or, where batches may have any size, whole batches.
            elif self._fills_up_samples:
                yield self._filled_with_samples(batches, first_step)
            elif self.even_batches:
                yield self._filled_with_batches(batches, first_step)
            elif self.process_index < len(batches):
                yield self._left_uneven(batches)

    def _parts_of_batches(self) -> Iterator[list]:
        """For each step one batch, in equal parts for the processes: `[0 1 2 3]` becomes `[0 1] [2 3]`."""
        size = self.samples_per_process
        for batch in self._batches():
            yield [batch[begin : begin + size] for begin in range(0, len(batch), size)]

    def _batches(self) -> Iterator[list]:
        """All batches. With `even_batches`, raise a ValueError if any but the last has another size."""
        must_be_last = False
        for batch in self.batch_sampler:
            if must_be_last:
                raise ValueError("batches of different sizes need even_batches=False")
            must_be_last = self._fills_up_samples and len(batch) != self.batch_size
            yield batch

    def _filled_with_samples(self, batches: list, first_step: list) -> Step:
        """A last step with samples of the first one after its own, so that each process has a full batch.

        After a first step `[0 1] [2 3]`, the last step `[4]` becomes `[4 0] [1 2]`: one of its samples is real.
        """
        size = self.samples_per_process
        samples = list(chain(*batches))
        num_real = len(samples)
        missing = self.num_processes * size - num_real
        first_samples = chain(*first_step)
        samples += islice(cycle(first_samples), missing)
        begin = self.process_index * size
        short_step = ShortStep.filled(num_real, size, self.process_index, self.num_processes)
        return Step(samples[begin : begin + size], short_step)

    def _filled_with_batches(self, batches: list, first_step: list) -> Step:
        """A step with whole batches of the first one after its own, so that each process has a batch.

        After a first step `[0 1 2] [3]`, the last step `[4 5]` becomes `[4 5] [0 1 2]`: two of its samples are real. A
        complete step of batches that differ in size, such as the first one here, stays as it is.
        """
        missing = self.num_processes - len(batches)
        filled = [*batches, *islice(cycle(first_step), missing)]
        rows = tuple(map(len, filled))
        real = rows[: len(batches)] + (0,) * missing
        return Step(filled[self.process_index], ShortStep(self.process_index, rows, real))

    def _left_uneven(self, batches: list) -> Step:
        """A step as it is: `[4 5] [6]` gives process 0 two samples, and process 1 one; `[4 5]` gives process 1 none."""
        rows = tuple(map(len, batches))
        return Step(batches[self.process_index], ShortStep(self.process_index, rows, real=rows))

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
            return total  # as in the original: only the batch sampler knows how many samples its last batch has
        sampler: Any = self.batch_sampler.sampler
        in_last_batch = len(sampler) - (total - 1) * self.batch_size
        before_this_process = self.process_index * self.samples_per_process
        return total - 1 if in_last_batch <= before_this_process else total


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        # A batch sampler of the script's own may have neither.
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list]:
        yield from islice(self.batch_sampler, self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


def groups_of(batches: Iterable[Any], size: int) -> Iterator[list]:
    """Lists of `size` batches, read when they are asked for; the last list may have fewer."""
    batches = iter(batches)
    group = list(islice(batches, size))
    while group:
        yield group
        group = list(islice(batches, size))


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Raise ValueError if a batch of that size cannot be divided by so many processes."""
    if batch_size is None or batch_size % num_processes:
        raise ValueError(f"split_batches needs a batch size that {num_processes} processes can split, not {batch_size}")


def steps_of(batches: Any) -> Iterator[Step]:
    """The steps of a process that reads by `batches`: a BatchSamplerShard, or what a loader on one process reads by.

    `iter` of a sampler of the script's own is called at once, because it may draw random numbers.
    """
    if isinstance(batches, BatchSamplerShard):
        return batches.steps()
    return _steps_of_one_process(iter(batches), getattr(batches, "batch_size", None))


def _steps_of_one_process(batches: Iterator[Any], full_size: int | None) -> Iterator[Step]:
    """Each batch as a step: a short one if it has not the full size. Without a size each may be a single number."""
    for batch in batches:
        short_step = None
        if full_size is not None and len(batch) != full_size:
            rows = (len(batch),)
            short_step = ShortStep(rank=0, rows=rows, real=rows)
        yield Step(batch, short_step)


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


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of torch that `sampler` draws from, if any. Generators of NumPy and of `random` do not count."""
    generator = getattr(sampler, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def follows_from_epoch(batches: Any) -> bool:
    """True where the order of `batches` is sequential, or a function of a seed and the epoch, as far as is known."""
    *wrappers, sampler = sampler_chain(batches)
    known = (SequentialSampler, SeedableRandomSampler, DistributedSampler, DistributedEvalSampler, Sequence)
    # These make batches of what they are given, and draw nothing by themselves; a script's own may draw.
    group_in_order = all(type(wrapper) in (BatchSampler, BatchSamplerShard, SkipBatchSampler) for wrapper in wrappers)
    return group_in_order and isinstance(sampler, known)
