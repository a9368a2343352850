"""The milliseconds of each part of each level's step."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import anatomy

GROUPS = keyed(anatomy.groups())


def test_step(group_key, row, replay, quick):
    facts = replay(group_key, row)
    if not quick and not facts["noisy"]:
        assert abs(facts["sum_of_whole"] - 1) <= anatomy.MOST_LEFT_OVER
