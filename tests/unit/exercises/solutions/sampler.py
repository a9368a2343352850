from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class ExactSampler(Sampler[int]):
    def __init__(self, dataset: Sized, rank: int, world_size: int, seed: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter(order[self.rank :: self.world_size])

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.world_size))
