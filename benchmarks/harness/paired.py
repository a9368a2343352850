"""Fair timing: contestants take turns round by round, and what counts is how they differ within a round.

A machine's speed drifts, with its temperature and with its other users. What is timed one after another differs by that
drift; what takes turns shares it. So every timing of the benchmarks takes one sample of each contestant in every round,
in an order that is drawn anew for each round, with a seed. Two of them are compared by the median over rounds of their
ratio, or difference, in the same round. Its interval reaches from one sample to another, and holds whatever the
distribution: each sample lies below the true median with a probability of 1/2, as a coin falls. So all of n samples lie
on one side of it with a probability of 2 / 2^n, and the interval of 4 rounds, from the least to the greatest, holds it
with 87.5 %. Of more rounds it leaves out as many samples on either side as 95 % allow: one of 10, which is 97.9 %.

The spread of a row is the width of the middle half of its samples as a share of their median: (upper quartile − lower
quartile) / median. It says how well the median is known without letting one disturbed round speak for all. A row is
noisy if its spread is over 15 %.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

NOISY = 0.15
SEED = 42
LEAST_CONFIDENCE = 0.95  # of an interval of FEWEST_ROUNDS or more
FEWEST_ROUNDS = 6

# Of each contestant one number per round: the i-th numbers of all belong to the same round.
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Summary:
    """The median of some samples and their quartiles `low` and `high`; all three the same if there is one sample."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """(high − low) / median, a share of the median."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0

    @property
    def noisy(self) -> bool:
        return self.spread > NOISY


def order(names: list[str], turn: int) -> list[str]:
    """The names in the order of round number `turn`: a random permutation, the same in every run."""
    dice = random.Random(f"{SEED} {turn}")
    return dice.sample(names, len(names))


def measure(contestants: Mapping[str, Callable[[], float]], rounds: Iterable[int] | int) -> Samples:
    """The samples of so many rounds. In each, every contestant is called once, in the order of that round.

    A contestant does its own timing, so that what it prepares is not counted.

    Args:
        rounds: a number, or an iterable of the rounds' numbers, such as a progress bar.
    """
    samples: Samples = {name: [] for name in contestants}
    for turn in range(rounds) if isinstance(rounds, int) else rounds:
        for name in order(list(contestants), turn):
            samples[name].append(contestants[name]())
    return samples


def summarise(samples: list[float]) -> Summary:
    """Median and quartiles of at least one sample. Quartiles lie between samples, never outside of them."""
    if len(samples) == 1:
        return Summary(median=samples[0], low=samples[0], high=samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, low, high)


def interval_of_median(samples: list[float]) -> tuple[float, float]:
    """The ends of the interval of the median, two of the samples; equal ones of a single sample."""
    in_order = sorted(samples)
    outside = _outside(len(samples))
    return in_order[outside], in_order[-1 - outside]


def confidence(rounds: int) -> float:
    """The probability that an interval of so many rounds holds the true median."""
    return _probability(rounds, _outside(rounds))


def _outside(rounds: int) -> int:
    """How many samples the interval leaves out on either side."""
    outside = 0
    while _probability(rounds, outside + 1) >= LEAST_CONFIDENCE:
        outside += 1
    return outside


def _probability(rounds: int, outside: int) -> float:
    """That more than `outside` of the samples lie on either side of the true median."""
    outcomes = sum(math.comb(rounds, number) for number in range(outside + 1))
    at_most_outside = outcomes / 2**rounds
    return 1 - 2 * at_most_outside


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """ours / theirs, round by round."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """ours − theirs, round by round."""
    return [mine - other for mine, other in zip(ours, theirs, strict=True)]
