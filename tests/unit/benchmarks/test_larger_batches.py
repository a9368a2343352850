"""Larger batches: each rule does what it says, the page says what was recorded, and the picture is drawn."""

import pytest
import torch

from benchmarks.report import page_tables
from benchmarks.suites import larger_batches
from benchmarks.suites.larger_batches import GUESSING, KEPT, LINEAR, ROOT, RULES, Digits, Start

ADAMW = Start("AdamW", 4e-3)
SGD = Start("SGD", 0.05)
SCALED_BETAS = RULES["AdamW"][-1]


@pytest.fixture(scope="module")
def two_classes() -> tuple[Digits, Digits]:
    """Bright and dark images, which a few steps tell apart."""
    torch.manual_seed(0)
    labels = torch.arange(1024) % 2
    images = torch.rand(1024, 1, 14, 14) + labels[:, None, None, None]
    return Digits(images, labels), Digits(images[:100], labels[:100])


def test_the_rate_follows_the_rule():
    network = torch.nn.Linear(1, 1)
    rates = [larger_batches.make_optimizer(SGD, network, 4, rule).defaults["lr"] for rule in (KEPT, ROOT, LINEAR)]
    assert rates == pytest.approx([0.05, 0.1, 0.2])


def test_scaled_moving_averages_go_over_as_many_samples():
    network = torch.nn.Linear(1, 1)
    one = larger_batches.make_optimizer(ADAMW, network, 1, SCALED_BETAS).defaults["betas"]
    four = larger_batches.make_optimizer(ADAMW, network, 4, SCALED_BETAS).defaults["betas"]
    for beta, beta_of_four in zip(one, four, strict=True):
        assert 4 / (1 - beta_of_four) == pytest.approx(1 / (1 - beta))


def test_a_training_learns_and_one_with_too_long_steps_ends_at_guessing(two_classes):
    assert larger_batches.trained_loss(ADAMW, 1, KEPT, 0, *two_classes) < 0.5 * GUESSING
    assert larger_batches.trained_loss(Start("SGD", 1e6), 8, LINEAR, 0, *two_classes) == GUESSING


def losses(group: dict) -> dict[tuple[str, int], float]:
    """The median loss by rule and number of ranks."""
    return {(row["rule"], row["ranks"]): row["median"] for row in group["rows"].values()}


def test_the_record_says_what_the_page_says():
    adamw, sgd, fast_sgd = (losses(group) for group in page_tables.recorded("larger_batches")["groups"])
    # A rate that is kept is worse than one that grows with √k.
    for loss in (adamw, sgd):
        assert all(loss["× 1", ranks] > loss["× √k", ranks] for ranks in (2, 4, 8))
    # AdamW: up to four ranks √k and k lose little; with eight both lose a third or so.
    for rule in ("× √k", "× k"):
        assert max(adamw[rule, 2], adamw[rule, 4]) < 1.15 * adamw["× 1", 1]
        assert adamw[rule, 8] > 1.3 * adamw["× 1", 1]
    # SGD with a low rate: k keeps the loss up to four ranks, and is the best of the rules.
    assert max(sgd["× k", 2], sgd["× k", 4]) < 1.05 * sgd["× 1", 1]
    assert all(sgd["× k", ranks] < sgd["× √k", ranks] for ranks in (2, 4, 8))
    # With the best rate for one rank, k holds for two ranks only.
    assert fast_sgd["× k", 2] < 1.05 * fast_sgd["× 1", 1]
    assert fast_sgd["× k", 4] > 1 and fast_sgd["× k", 8] > 2
    assert fast_sgd["× k, warm-up", 4] < fast_sgd["× k", 4]
