"""Which samples, in which order, on which process: arithmetic on indices, without data and without collectives."""

from collections.abc import Iterator, Sized
from itertools import chain, cycle, islice

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, Sampler

# A process's batch and, where the step is irregular, how many of its samples are real and how many processes take part.
Share = tuple[list[int], tuple[int | None, int] | None]


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is a function of seed and epoch: `torch.randperm(n)` seeded with their sum.

    Args:
        args, kwargs: of RandomSampler. A `generator` is used and seeded anew for each epoch.
        data_seed: the seed; by default `torch.initial_seed()`.
    """

    def __init__(self, *args, data_seed: int | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`; each full pass moves on to the next by itself."""
        self.epoch = epoch


class ShardedBatches(BatchSampler):
    """One process's batches, told one batch ahead, so that the last one is known when it is handed out.

    Subclasses say in `shares` what this process gets in every step. While they are iterated over:

    Attributes:
        start: steps to pass over at the start of the next iteration.
        last_step: the number (from 0) of this process's last step, once it has been handed out.
        irregular: for the steps so far in which processes differ in samples, or hold repeated ones: how many of this
            process's samples are real (None: all there are) and how many processes take part.
    """

    def __iter__(self) -> Iterator[list[int]]:
        self.last_step, self.irregular = None, {}
        ahead, step = None, -1
        for batch, irregular in self.shares():
            if step >= 0:
                yield ahead
            ahead, step = batch, step + 1
            if irregular is not None:
                self.irregular[step] = irregular
        if step >= 0:
            self.last_step = step
            yield ahead


class BatchSamplerShard(ShardedBatches):
    """The batches of `batch_sampler` that belong to one process.

    In step k process r takes batch k·num_processes + r or, with `split_batches`, the r-th equal part of batch k. Either
    way the shares of one step, in rank order, are consecutive samples of the global order. What the data lack to fill
    the last step is repeated from the first samples with `even_batches`; without, the last processes get less or
    nothing; with the batch sampler's `drop_last`, the step is dropped.

    A batch sampler without a `batch_size`, whose batches may differ in size, is dealt out in whole batches.

    Attributes:
        whole: hand out the shares of all processes in one, and count the real samples of the whole step; for the
            process that loads for the others.

    Raises:
        ValueError: if `split_batches` cannot split the batch size evenly; while iterating with `even_batches`, if a
            batch that is not the last has another size.
    """

    whole = False

    def __init__(self, batch_sampler, num_processes=1, process_index=0, split_batches=False, even_batches=True) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.start = 0
        size = self.batch_size
        if split_batches and (size is None or size % num_processes):
            raise ValueError(f"split_batches needs a batch size that {num_processes} processes can split, not {size}")

    def shares(self) -> Iterator[Share]:
        width = 1 if self.split_batches else self.num_processes
        fill = self.even_batches and not self.drop_last
        group, first = [], []
        for number, batch in enumerate(self.batch_sampler):
            if fill and number < width:
                first.append(batch)
            if number < self.start * width:
                continue
            if self.even_batches and group and not self._is_whole(group[-1]):
                raise ValueError("batches of different sizes need even_batches=False")
            group.append(batch)
            if len(group) == width and (self._is_whole(batch) or not self.even_batches):
                yield from self._share(group, [])
                group = []
        if group and not self.drop_last:
            yield from self._share(group, first)

    def _is_whole(self, batch: list[int]) -> bool:
        return self.batch_size is None or len(batch) == self.batch_size

    def _share(self, group: list[list[int]], first: list[list[int]]) -> Iterator[Share]:
        """This process's part of a step's batches, which are filled up from `first`, the batches of the first step."""
        rank, processes, real = self.process_index, self.num_processes, sum(map(len, group))
        if self.batch_size is None:
            filled = [*group, *islice(cycle(first), processes - len(group))]
            if rank < len(filled):
                yield filled[rank], (None if rank < len(group) else 0, len(filled))
            return
        size = self.batch_size // processes if self.split_batches else self.batch_size
        if first or self.split_batches:
            filled = [*chain(*group), *islice(cycle(chain(*first)), processes * size - real)]
            group = [filled[at : at + size] for at in range(0, len(filled), size)]
        if self.whole:
            yield [*chain(*group)], None if real == processes * size else (real, len(group))
        elif rank < len(group):
            own = min(max(real - rank * size, 0), size) if first else len(group[rank])
            yield group[rank], None if real == processes * size else (own, len(group))

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if not self.split_batches:
            whole, extra = divmod(total, self.num_processes)
            return whole + (not self.drop_last and (extra > 0 if self.even_batches else self.process_index < extra))
        if self.drop_last or self.even_batches or total == 0:
            return total
        last = len(self.batch_sampler.sampler) - (total - 1) * self.batch_size
        return total - (last <= self.process_index * (self.batch_size // self.num_processes))


class EvalBatches(ShardedBatches):
    """The batches that `batch_sampler` makes of a DistributedEvalSampler, in as many steps on every process.

    Where this process has no sample left and another has, the batch is empty: a forward through DDP, or any other
    collective in the loop, is then called on all of them.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler, self.start = batch_sampler, 0
        self.batch_size, self.num_processes = batch_sampler.batch_size, batch_sampler.sampler.num_replicas

    def shares(self) -> Iterator[Share]:
        batches = islice(self.batch_sampler, self.start, None)
        for _ in range(self.start, len(self)):
            batch = next(batches, [])
            yield batch, (len(batch), self.num_processes)

    def __len__(self) -> int:
        most = -(-len(self.batch_sampler.sampler.dataset) // self.num_processes)
        return most // self.batch_size if self.batch_sampler.drop_last else -(-most // self.batch_size)


class SkipBatchSampler(BatchSampler):
    """The batches of `batch_sampler` without the first `skip_batches`."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batch_sampler, self.skip_batches, None)

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
        self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None, shuffle=False, seed: int = 0
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if distributed else 1
        if rank is None:
            rank = dist.get_rank() if distributed else 0
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not one of {num_replicas} replicas: need 0 <= rank < num_replicas")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

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
