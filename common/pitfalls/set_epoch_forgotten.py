"""`set_epoch` forgotten: every epoch repeats the order of the first.

DistributedSampler cannot draw from a generator that advances, because all ranks
must draw the same order. It seeds one with seed + epoch instead, and learns the
epoch from `set_epoch` only. A loader that `prepare` returns counts its epochs.
"""

from torch.utils.data import DistributedSampler


def wrong():
    sampler = DistributedSampler(range(100), seed=42)
    epochs = []
    for _ in range(3):
        epochs.append(list(sampler))
    return epochs


def right():
    sampler = DistributedSampler(range(100), seed=42)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


def detect(epochs):
    for epoch, order in enumerate(epochs):
        if order in epochs[:epoch]:
            first = epochs.index(order)
            return f"epoch {epoch} has the order of epoch {first}"
