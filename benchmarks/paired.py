"""Fair timing: contestants take turns round by round, and what counts is how they differ within a round.

A machine's speed drifts, with its temperature and with its other users. What is timed one after another differs by that
drift; what takes turns shares it. So every timing of the benchmarks goes A B C, B C A, C A B, …, one sample of each in
every round, and two of them are compared by the median over rounds of their ratio, or difference, in the same round.

The spread of a row is the width of the middle half of its samples as a share of their median: (upper quartile − lower
quartile) / median. It says how well the median is known without letting one disturbed round speak for all. A row is
noisy if its spread is over 15 %.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

NOISY = 0.15

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
        """Whether the spread is over 15 %."""
        return self.spread > NOISY


def take_turns(contestants: Mapping[str, Callable[[], float]], turn: int) -> dict[str, float]:
    """One round: call every contestant once, beginning with number `turn` modulo their number. Returns their samples.

    A contestant does its own timing, so that what it prepares is not counted.
    """
    names = list(contestants)
    first = turn % len(names)
    return {name: contestants[name]() for name in names[first:] + names[:first]}


def measure(contestants: Mapping[str, Callable[[], float]], rounds: Iterable[int] | int) -> Samples:
    """The samples of `rounds` rounds: a number, or an iterable of the rounds' numbers, such as a progress bar."""
    samples: Samples = {name: [] for name in contestants}
    for turn in range(rounds) if isinstance(rounds, int) else rounds:
        for name, sample in take_turns(contestants, turn).items():
            samples[name].append(sample)
    return samples


def summarise(samples: list[float]) -> Summary:
    """Median and quartiles of at least one sample. Quartiles lie between samples, never outside of them."""
    if len(samples) == 1:
        return Summary(*samples * 3)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(median, low, high)


def paired_ratio(ours: list[float], theirs: list[float]) -> Summary:
    """Of the ratios ours / theirs, round by round."""
    return summarise([mine / other for mine, other in zip(ours, theirs, strict=True)])


def paired_difference(ours: list[float], theirs: list[float]) -> Summary:
    """Of the differences ours − theirs, round by round, in the samples' unit."""
    return summarise([mine - other for mine, other in zip(ours, theirs, strict=True)])
