"""Data sets, streams and a network that are small enough to follow by hand, for tests of every room."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset):
    """0 to n - 1, each a tensor."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.as_tensor(index)


class Augmented(Numbers):
    """Numbers, each with a random one that is drawn in the process that reads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item()])


class NumbersOfEpoch(Numbers):
    """Numbers plus 1000 times the epoch that `set_epoch` was given."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.as_tensor(index + 1000 * self.epoch)


class Stream(IterableDataset):
    """Samples one after the other; how many there are is known at their end."""

    def __init__(self, samples: Sequence) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator:
        return (self.samples[index] for index in range(len(self.samples)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class StreamOfWorkers(Stream):
    """A stream of which each loader worker reads a part of its own."""

    def __iter__(self) -> Iterator:
        worker = get_worker_info()
        return iter(self.samples[worker.id :: worker.num_workers])


class ShuffledStream(SizedStream):
    """A stream in an order that its own generator draws in every epoch."""

    def __init__(self, samples: Sequence, seed: int) -> None:
        super().__init__(samples)
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator:
        order = torch.randperm(len(self.samples), generator=self.generator)
        return (self.samples[index] for index in order.tolist())


class Points(Dataset):
    """n points in 16 dimensions with labels 0 to 9 that a linear model can learn; samples are dicts."""

    def __init__(self, n: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 16, generator=generator).to(dtype)
        self.labels = (self.x @ torch.randn(16, 10, generator=generator).to(dtype)).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {"x": self.x[index], "labels": self.labels[index]}


class Net(nn.Module):
    """A linear model of points with dropout; returns its loss if it is given labels."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels=None):
        logits = self.linear(self.dropout(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def seeded_net(kind: type[nn.Module] = Net, **kwargs) -> nn.Module:
    """Leaves torch's generator as it is after the seed 3 and the weights."""
    torch.manual_seed(3)
    return kind(**kwargs)


def loss_per_item(outputs, labels, num_items_in_batch):
    """A Trainer's `compute_loss_func` that divides by the items of the whole step."""
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def seeded_order(n: int, seed: int, epoch: int = 0) -> list[int]:
    """The order of n samples that a sampler seeded with seed + epoch draws."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
