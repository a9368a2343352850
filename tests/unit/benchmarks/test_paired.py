"""The statistics behind every timing, on samples whose answers are known."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.paired import (
    CONFIDENCE,
    FEWEST_ROUNDS,
    Interval,
    bootstrap,
    confidence,
    differences,
    measure,
    order,
    ratios,
    summarise,
)

positive = st.floats(1e-3, 1e6)


def test_every_round_has_all_contestants_in_an_order_of_its_own():
    played = []
    contestants = {name: lambda name=name: played.append(name) or float(len(played)) for name in "abcd"}
    samples = measure(contestants, 20)
    rounds = ["".join(played[begin : begin + 4]) for begin in range(0, 80, 4)]
    assert {"".join(sorted(names)) for names in rounds} == {"abcd"}
    assert len(set(rounds)) > 5
    assert {names[0] for names in rounds} == set("abcd")
    assert played[int(samples["c"][7]) - 1] == "c"
    assert rounds == ["".join(order(list("abcd"), turn)) for turn in range(20)]


def test_the_interval_of_a_median_is_a_bootstraps():
    assert bootstrap([7.0]) == Interval(7.0, 7.0)
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 100.0]
    found = bootstrap(samples)
    assert found == bootstrap(samples)
    assert 1.0 < found.low < 5.5 < found.high < 100.0
    assert bootstrap([5.0] * 10) == Interval(5.0, 5.0)


def test_the_interval_holds_the_true_median_about_as_often_as_it_says():
    dice = random.Random(3)
    held = 0
    for _ in range(60):
        interval = bootstrap([dice.gauss(10, 1) for _ in range(15)])
        held += interval.low <= 10 <= interval.high
    assert held >= 51


@pytest.mark.parametrize(
    ("rounds", "most"),
    [
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        pytest.param(2, 0.5, marks=pytest.mark.slow),
        pytest.param(3, 0.75, marks=pytest.mark.slow),
        (4, 0.875),
    ],
)
def test_an_interval_of_few_rounds_holds_the_median_no_more_often_than_it_says(rounds, most):
    assert confidence(rounds) == most
    dice = random.Random(5)
    intervals = [bootstrap([dice.gauss(10, 1) for _ in range(rounds)]) for _ in range(300)]
    held = sum(interval.low <= 10 <= interval.high for interval in intervals)
    assert held / 300 == pytest.approx(most, abs=0.06)


def test_the_fewest_rounds_of_a_verdict_are_the_first_that_can_claim_the_confidence():
    assert confidence(FEWEST_ROUNDS) == confidence(100) == CONFIDENCE
    assert confidence(FEWEST_ROUNDS - 1) < CONFIDENCE


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
    ratio = summarise(ratios(ours, theirs))
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.9, 0.9, 0.9))
    assert summarise(ours).noisy and not ratio.noisy
    shifted = summarise(differences([t + 7 for t in theirs], theirs))
    assert (shifted.low, shifted.median, shifted.high) == pytest.approx((7, 7, 7))


def test_samples_of_different_rounds_are_no_pairs():
    with pytest.raises(ValueError):
        ratios([1, 2], [1])
