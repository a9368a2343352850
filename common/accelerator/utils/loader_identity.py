"""Which data a loader goes through, so that no other loader takes over the position that a checkpoint holds."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..sampler import innermost_sampler
from ..shard import index_sampler_of


@dataclass(frozen=True)
class LoaderIdentity:
    """The facts about a loader that stay the same when a run is resumed with another batch size or number of processes.

    Attributes:
        is_stream: whether the data set is an IterableDataset, which has no sample numbers.
        samples: how many samples there are for the loader to draw; None where that is not known.
        shuffles: whether the order is random; None where the sampler is not one of torch's.
    """

    is_stream: bool
    samples: int | None
    shuffles: bool | None

    @classmethod
    def of(cls, loader: Any) -> "LoaderIdentity":
        """The identity of a prepared `loader`."""
        if isinstance(loader.dataset, IterableDataset):
            return cls(is_stream=True, samples=_length_of_dataset(loader), shuffles=None)
        sampler = innermost_sampler(index_sampler_of(loader))
        if isinstance(sampler, SubsetRandomSampler):
            samples: int | None = len(sampler.indices)
        else:
            # Not the length of the sampler: a RandomSampler may leave out the tail of the epoch that fills no step, and
            # with another batch size that tail has another length.
            samples = _length_of_dataset(loader)
        return cls(is_stream=False, samples=samples, shuffles=_is_random(sampler))

    def is_other_than(self, saved: "LoaderIdentity") -> bool:
        """True where something that is known of both differs."""
        return (
            self.is_stream != saved.is_stream
            or _differ(self.samples, saved.samples)
            or _differ(self.shuffles, saved.shuffles)
        )

    def __str__(self) -> str:
        kind = "a stream" if self.is_stream else "a data set"
        number = "an unknown number of" if self.samples is None else self.samples
        order = {True: "in random order", False: "in order", None: "in an unknown order"}[self.shuffles]
        return f"{kind} of {number} samples, {order}"


def _length_of_dataset(loader: Any) -> int | None:
    try:
        return int(loader.total_dataset_length)
    except Exception:  # whatever a data set without a length raises
        return None


def _is_random(sampler: Any) -> bool | None:
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        return True
    return None


def _differ(one: Any, other: Any) -> bool:
    is_known = one is not None and other is not None
    return is_known and one != other
