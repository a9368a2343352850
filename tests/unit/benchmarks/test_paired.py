"""The statistics behind every timing, on samples whose answers are known."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paired import Samples, measure, paired_difference, paired_ratio, summarise, take_turns
from benchmarks.readmes import recorded

positive = st.floats(1e-3, 1e6)


def test_contestants_take_turns_and_each_begins_a_round():
    played = []
    contestants = {name: lambda name=name: played.append(name) or float(len(played)) for name in "abc"}
    samples = measure(contestants, 3)
    assert "".join(played) == "abcbcacab"
    assert samples == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    assert take_turns(contestants, 4) == {"b": 10, "c": 11, "a": 12}


def test_median_quartiles_and_spread_of_known_samples():
    summary = summarise([10, 14, 11, 13, 12])
    assert (summary.low, summary.median, summary.high) == (11, 12, 13)
    assert summary.spread == pytest.approx(2 / 12)


def test_one_sample_is_its_own_summary():
    summary = summarise([7.0])
    assert (summary.low, summary.median, summary.high, summary.spread) == (7, 7, 7, 0)


@pytest.mark.parametrize(("width", "noisy"), [(14.9, False), (15.1, True)])
def test_a_row_is_noisy_above_15_percent(width, noisy):
    assert summarise([100 - width, 100 - width / 2, 100, 100 + width / 2, 100 + width]).noisy is noisy


@settings(deadline=None, derandomize=True)
@given(st.lists(positive, min_size=1, max_size=20))
def test_quartiles_enclose_the_median_and_never_leave_the_samples(samples):
    summary = summarise(samples)
    slack = 1e-9 * max(samples)
    assert min(samples) - slack <= summary.low <= summary.median + slack
    assert summary.median <= summary.high + slack <= max(samples) + 2 * slack


def test_a_drift_that_contestants_share_cancels_in_pairs():
    drift = [1.0, 3.0, 0.5, 2.0, 8.0]
    ours, theirs = [90 * d for d in drift], [100 * d for d in drift]
    ratio = paired_ratio(ours, theirs)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.9, 0.9, 0.9))
    assert summarise(ours).noisy and not ratio.noisy
    shifted = paired_difference([t + 7 for t in theirs], theirs)
    assert (shifted.low, shifted.median, shifted.high) == pytest.approx((7, 7, 7))


def test_samples_of_different_rounds_are_no_pairs():
    with pytest.raises(ValueError):
        paired_ratio([1, 2], [1])


def ordering(samples: Samples) -> set[tuple[str, str]]:
    """The pairs (larger, smaller) whose medians differ by more than the widths of both their middle halves together."""
    summaries = {name: summarise(own) for name, own in samples.items()}
    width = {name: summary.high - summary.low for name, summary in summaries.items()}
    return {
        (a, b)
        for a, b in itertools.permutations(summaries, 2)
        if summaries[a].median - summaries[b].median > width[a] + width[b]
    }


def test_only_what_differs_by_more_than_the_spreads_is_ordered():
    samples = {"a": [100, 101, 102], "b": [97.5, 98.5, 99.5], "c": [50, 70, 90], "d": [10, 10, 10]}
    # a and b: 2.5 apart, 1 wide each. c is 20 wide, and so is nothing else.
    assert ordering(samples) == {("a", "b"), ("a", "c"), ("b", "c"), ("a", "d"), ("b", "d"), ("c", "d")}
    assert ordering({"a": [100, 101, 102], "b": [98, 100, 102]}) == set()


def test_a_second_measurement_confirms_the_order():
    """Machines whose rounds vary by 5 %, with every tenth disturbed: what one run orders, no other run reverses."""
    dice = random.Random(1)

    def run() -> dict:
        contestants = {
            f"{speed}": lambda speed=speed: speed * dice.gauss(1, 0.05) * (0.5 if dice.random() < 0.1 else 1)
            for speed in (100, 103, 106, 115, 140)
        }
        return measure(contestants, 8)

    runs = [run() for _ in range(40)]
    claimed = [ordering(samples) for samples in runs]
    assert sum(map(len, claimed)) > 100  # and not because nothing is claimed
    assert not any((smaller, larger) in others for pairs in claimed for larger, smaller in pairs for others in claimed)


@pytest.mark.parametrize("batch_size", [64, 256])
def test_two_recorded_runs_order_the_levels_alike(batch_size):
    """The comparison and the suites measured the same rows, at different times."""
    groups = [*recorded("results")["throughput"], *recorded("throughput")["groups"]]
    runs = [group for group in groups if f"global batch {batch_size}" in group["group"]]
    first, second = ({name: row["samples"] for name, row in run["rows"].items()} for run in runs)
    pairs = [pair for pair in ordering(first) if {*pair} <= second.keys()]
    assert len(pairs) >= 4
    assert not any((smaller, larger) in ordering(second) for larger, smaller in pairs)
