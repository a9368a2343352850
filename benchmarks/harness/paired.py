"""Fair timing: contestants take turns round by round, and what counts is how they differ within a round.

A machine's speed drifts, with its temperature and with its other users. Contestants that are timed one after another
differ by that drift; those that take turns share it. Two of them are compared by the median over rounds of their ratio,
or difference, in the same round, with an interval that `interval_of_median` explains.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

LARGEST_QUIET_SPREAD = 0.15
SEED = 42
FEWEST_ROUNDS = 6  # The interval of as many rounds, or more, has at least LEAST_CONFIDENCE.
LEAST_CONFIDENCE = 0.95

T = TypeVar("T")
# Of each contestant one number per round: the i-th numbers of all belong to the same round.
Samples = dict[str, list[float]]


class Summary(NamedTuple):
    """Some samples in numbers.

    Attributes:
        low, high: the quartiles; the same as the median if there is one sample.
        spread: the width of the middle half of the samples, as a share of their median.
    """

    median: float
    low: float
    high: float
    spread: float

    @property
    def noisy(self) -> bool:
        return self.spread > LARGEST_QUIET_SPREAD


class Interval(NamedTuple):
    """Two of some samples, and the probability that the true median lies between them."""

    low: float
    high: float
    confidence: float


def take_turns(contestants: Mapping[str, Callable[[], T]], rounds: Iterable[int]) -> dict[str, list[T]]:
    """The results of some rounds. In each, every contestant is called once, in an order that is drawn anew.

    A contestant does its own timing, so that what it prepares is not counted. If all return numbers, the results
    are Samples. `rounds` may be a progress bar around a range, as in your_network.
    """
    dice = random.Random(SEED)
    results: dict[str, list[T]] = {name: [] for name in contestants}
    for _ in rounds:
        for name in dice.sample(list(contestants), len(contestants)):
            results[name].append(contestants[name]())
    return results


def summarise(samples: list[float]) -> Summary:
    """The summary of at least one sample. Quartiles lie between samples, never outside of them."""
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0], spread=0.0)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, low, high, spread=(high - low) / abs(median) if median else 0.0)


def interval_of_median(samples: list[float]) -> Interval:
    """The interval of the median, from one sample to another; it holds whatever the distribution.

    Each sample lies below the true median with a probability of 1/2, as a coin falls. So all of 4 samples lie on one
    side of it with 2 / 2^4, and the interval from the least to the greatest holds it with 87.5 %. Of more samples as
    many are left out on either side as LEAST_CONFIDENCE allows: one of 10, which is 97.9 %.
    """
    in_order = sorted(samples)
    outside = 0
    while _confidence(len(samples), outside + 1) >= LEAST_CONFIDENCE:
        outside += 1
    return Interval(in_order[outside], in_order[-1 - outside], _confidence(len(samples), outside))


def _confidence(samples: int, outside: int) -> float:
    """The confidence of an interval that leaves out `outside` of the samples on either side."""
    outcomes = sum(math.comb(samples, below) for below in range(outside + 1))
    return 1 - 2 * outcomes / 2**samples


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """ours / theirs, round by round."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]
