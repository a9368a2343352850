"""DistributedEvalSampler: each rank evaluates its own samples, and every sample is evaluated exactly once."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from common.process_group import get_rank, get_world_size


class DistributedEvalSampler(Sampler[int]):
    """Every sample exactly once over all ranks: rank r visits r, r + world size, r + 2·world size, …

    `torch.utils.data.DistributedSampler` repeats samples until every rank has equally many, so that an accuracy over
    10000 samples on 3 ranks becomes one over 10002. This sampler pads nothing. Who reads which of ten samples:

        rank   DistributedSampler    DistributedEvalSampler
        0      0 3 6 9               0 3 6 9
        1      1 4 7 0               1 4 7
        2      2 5 8 1               2 5 8

    With fewer samples than ranks some ranks visit none. Memory is O(1) unless `shuffle` is set.

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
        if num_replicas is None:
            num_replicas = get_world_size()
        if rank is None:
            rank = get_rank()
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
