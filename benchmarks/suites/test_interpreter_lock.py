"""The cost of the interpreter lock for replicas in threads."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import interpreter_lock

GROUPS = keyed(interpreter_lock.groups())


def test_forward(group_key, row, replay):
    facts = replay(group_key, row)
    assert facts["forwards"] >= 5
