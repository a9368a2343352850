"""Parts of records that are made by hand, as observers would note them."""

import torch

from common.doctor.record import Batch, End, Epoch, Network, Record, Step

STOPPED = End("stopped", "no rank made progress for 60 s")


def trained() -> list[Record]:
    """Two ranks that have made eight steps with one network."""
    return [Record(rank, steps=[Step([0.1], 1)] * 8, networks=[Network(forwards=1)]) for rank in range(2)]


def shuffled(seed: int) -> list[int]:
    return torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).tolist()


def epoch_of(order, content=lambda sample: (sample,), batch_size=4, length=1000, trained=True, dataset=0):
    """An epoch in which a rank reads these samples, and trains on each batch or evaluates it."""
    batches = []
    for first in range(0, len(order), batch_size):
        own = list(order[first : first + batch_size])
        contents = [content(sample) for sample in own]
        forwards = [len(own)] * trained
        batches.append(Batch(own, contents, len(batches) * trained, forwards=forwards, evaluated=not trained))
    return Epoch(dataset, length, range(length), complete=True, batches=batches)
