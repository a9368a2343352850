"""Ways of evaluating on several ranks: their counts and their costs."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import evaluation

GROUPS = keyed(evaluation.groups())
TEST_IMAGES = 10_000


def test_evaluation(group_key, row, replay):
    facts = replay(group_key, row)
    repeats = row == evaluation.PADDED and group_key == "evaluation"  # 10,000 cannot be divided by 3
    assert facts["counted"] == TEST_IMAGES + 2 * repeats
    if row in (evaluation.PADDED, evaluation.EXACT):
        assert facts["collectives"] == 1
