"""Deal out the samples exactly.

Write a sampler that gives each rank its share of a shuffled dataset. The order of an epoch is
`torch.randperm(len(dataset), generator=generator)`, with a new generator that is seeded with `seed + epoch`. Of W
ranks, rank r gets the positions r, r + W, r + 2 W and so on of that order. Every sample is dealt out to exactly one
rank: no sample is repeated to make the shares equally long, and none is dropped. There may be fewer samples than ranks.
The epoch is 0 until `set_epoch` chooses another one, and every `list(sampler)` in an epoch gives the same.

    sampler = ExactSampler(dataset, rank, world_size, seed)
    sampler.set_epoch(1)
    list(sampler)    the numbers of this rank's samples, ints
    len(sampler)     how many there are

    python -m common.ladder check sampler my_sampler.py
"""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class ExactSampler(Sampler[int]):
    """The share of one rank in each epoch."""

    def __init__(self, dataset: Sized, rank: int, world_size: int, seed: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of `epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError("yield the numbers of this rank's samples")

    def __len__(self) -> int:
        raise NotImplementedError("say how many samples this rank gets")
