"""The statistics behind every timing, on samples whose answers are known."""

import pytest

from benchmarks.harness.paired import FEWEST_ROUNDS, LEAST_CONFIDENCE, interval_of_median, summarise, take_turns


def test_every_round_has_all_contestants_in_an_order_of_its_own():
    played = []
    contestants = {name: lambda name=name: played.append(name) or float(len(played)) for name in "abcd"}
    samples = take_turns(contestants, range(20))
    rounds = ["".join(played[begin : begin + 4]) for begin in range(0, 80, 4)]
    assert {"".join(sorted(names)) for names in rounds} == {"abcd"}
    assert len(set(rounds)) > 5
    assert {names[0] for names in rounds} == set("abcd")
    assert played[int(samples["c"][7]) - 1] == "c"
    assert take_turns(contestants, range(20))["c"] == [number + 80 for number in samples["c"]]


def confidence(rounds: int) -> float:
    return interval_of_median([float(number) for number in range(rounds)]).confidence


def test_the_interval_of_a_median_leaves_out_as_many_samples_on_either_side():
    assert interval_of_median([7.0]) == (7.0, 7.0, 0.0)
    assert interval_of_median([3.0, 1.0, 2.0, 100.0]) == (1.0, 100.0, 0.875)
    ten = [5.0, 4.0, 3.0, 2.0, 1.0, 6.0, 7.0, 8.0, 9.0, 100.0]
    assert interval_of_median(ten) == (2.0, 9.0, 1 - 2 * (1 + 10) / 2**10)


def test_from_the_fewest_rounds_on_an_interval_has_the_least_confidence():
    assert [confidence(rounds) for rounds in (1, 2, 3)] == [0, 0.5, 0.75]
    assert all(confidence(rounds) >= LEAST_CONFIDENCE for rounds in range(FEWEST_ROUNDS, 100))
    assert confidence(FEWEST_ROUNDS - 1) < LEAST_CONFIDENCE


@pytest.mark.parametrize(
    "samples, low, median, high, noisy",
    [
        ([10, 14, 11, 13, 12], 11, 12, 13, True),
        ([100 - 14.9, 100 - 7.45, 100, 100 + 7.45, 100 + 14.9], 92.55, 100, 107.45, False),
        ([100 - 15.1, 100 - 7.55, 100, 100 + 7.55, 100 + 15.1], 92.45, 100, 107.55, True),
        ([7.0], 7, 7, 7, False),
    ],
)
def test_median_quartiles_and_noise_of_known_samples(samples, low, median, high, noisy):
    summary = summarise(samples)
    assert (summary.low, summary.median, summary.high) == pytest.approx((low, median, high))
    assert summary.spread == pytest.approx((high - low) / median)
    assert summary.noisy is noisy  # above 15 %
