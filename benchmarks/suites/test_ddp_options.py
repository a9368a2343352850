"""What DDP's options do to the time of a step."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import ddp_options

GROUPS = keyed(ddp_options.groups())


def test_step(group_key, row, replay):
    facts = replay(group_key, row)
    assert facts["max_weight_difference"] <= facts["tolerance"]
