"""The distance of level 00's step from what the hardware can do."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import limit

GROUPS = keyed(limit.groups())


def test_step(group_key, row, replay):
    facts = replay(group_key, row)
    assert facts["max_weight_difference"] <= facts["tolerance"]
    assert facts.get("drift", 0) <= facts.get("most_drift", 0)
