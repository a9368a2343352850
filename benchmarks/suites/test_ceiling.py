"""How far below the machine's roofline each level's step is."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import ceiling

GROUPS = keyed(ceiling.groups())


def test_step(group_key, row, replay):
    replay(group_key, row)
