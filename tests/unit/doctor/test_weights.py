"""Weights and statistics of BatchNorm that differ between the ranks: by mistake or for a reason."""

import pytest
import torch

from common.doctor.checks import optimizers, weights
from common.doctor.record import Step
from common.doctor.results import Finding, Skipped
from tests.unit.doctor.records import epoch_of, trained

APART = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0])]  # the weights of rank 0 and of rank 1
EQUAL = [torch.tensor([3.0, 3.0])] * 2


def verdict(*by_step, wrapped=False, rates_of_rank_1=(0.1,) * 8, exchanged_after=()) -> type:
    """The kind of result where two ranks have such weights after the first, the second, … of eight steps."""
    records = trained()
    records[0].networks[0].wrapped = wrapped
    records[0].networks[0].trained_numbers = 2
    records[0].exchanged.update(dict.fromkeys(exchanged_after, 2))
    records[1].steps = [Step([rate], 1) for rate in rates_of_rank_1]
    for step, of_ranks in enumerate(by_step, start=1):
        for one, tensor in zip(records, of_ranks, strict=True):
            one.networks[0].weights[step] = {"w": tensor}
    return type(weights.check_same_weights(records))


def test_weights_may_be_averaged_where_they_are_equal_again_or_after_the_last_step():
    assert verdict(APART, EQUAL, APART) is Skipped
    assert verdict(EQUAL, APART, APART) is Finding
    assert verdict(APART, APART, exchanged_after=[8]) is Skipped


def test_weights_may_differ_because_of_the_learning_rate_at_the_steps_of_both_ranks():
    assert verdict(APART, wrapped=True, rates_of_rank_1=[0.2] * 8) is Skipped
    assert verdict(APART, wrapped=True, rates_of_rank_1=[0.1] * 9) is Finding


def test_a_network_needs_no_wrapper_if_the_script_exchanges_gradients_at_half_of_the_steps():
    assert verdict(APART, rates_of_rank_1=[0.2] * 8, exchanged_after=range(5)) is Skipped
    assert verdict(APART, rates_of_rank_1=[0.2] * 8, exchanged_after=range(4)) is Finding


@pytest.mark.parametrize("different_step, kind", [(4, Finding), (5, Skipped)])
def test_steps_are_compared_up_to_the_last_batch_of_the_rank_that_has_fewer(different_step, kind):
    records = trained()
    records[0].epochs = [epoch_of(range(24))]
    records[1].epochs = [epoch_of(range(20))]
    records[1].steps[different_step - 1] = Step([0.2], 1)
    for one in records:
        one.networks[0].statistics[different_step] = {"mean": APART[one.rank]}
    assert isinstance(optimizers.check_learning_rates(records), kind)
    assert isinstance(weights.check_same_statistics(records), kind)
