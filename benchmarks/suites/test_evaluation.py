"""Three ways of evaluating on three ranks: their counts and their costs."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import evaluation

GROUPS = keyed(evaluation.groups())
COUNTED = {evaluation.PADDED: 10_002, evaluation.EXACT: 10_000, evaluation.GATHERED: 10_000}


def test_evaluation(group_key, row, replay):
    facts = replay(group_key, row)
    assert facts["counted"] == COUNTED[row]
    if row != evaluation.GATHERED:
        assert facts["collectives"] == 1
