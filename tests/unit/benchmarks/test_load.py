"""The load that other programs put on our cores: counted on these only, and said with what it slows and what helps."""

import os
from unittest import mock

import pytest

from benchmarks import compare
from benchmarks.harness import load
from benchmarks.harness.load import busy_cores, what_is_slowed

# user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
BEFORE = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 100 0 0 500 0 0 0 0 0 0
cpu1 100 0 0 500 0 0 0 0 50 0
cpu2 100 0 0 500 0 0 0 0 0 0
intr 1 2 3
"""
# In 100 ticks core 0 worked half of the time, core 1 waited for a disk, and core 2, which is not ours, worked.
AFTER = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 110 10 10 550 0 0 0 20 0 0
cpu1 100 0 0 500 100 0 0 0 50 0
cpu2 200 0 0 500 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not say which cores are ours")
def test_the_work_of_others_on_our_cores_is_counted(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text(BEFORE)
    monkeypatch.setattr(load, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(load.time, "sleep", lambda _: stat.write_text(AFTER))
    assert busy_cores() == 0.5
    monkeypatch.setattr(load, "STAT", tmp_path / "none")
    assert busy_cores() is None


def test_a_busy_machine_is_told():
    assert what_is_slowed({"before": 0.3, "after": None}, cores=2) is None
    assert what_is_slowed({}, cores=2) is None
    said = what_is_slowed({"before": 1.6, "after": 0.1}, cores=2)
    assert "1.6 of 2 cores before" in said and "after" not in said


@pytest.mark.parametrize(
    "busy, users, decided",
    [(1.3, {}, True), (0.1, {}, False), (None, {}, False), (1.3, {"GOMP_SPINCOUNT": "100"}, False)],
)
def test_only_beside_other_programs_a_comparison_waits_passively_and_never_against_the_user(
    busy, users, decided, monkeypatch
):
    monkeypatch.setattr(compare, "busy_cores", lambda: busy)
    monkeypatch.setattr(compare, "available_cores", lambda: 2)
    with mock.patch.dict(os.environ, users):
        for name in set(load.WAITING) - set(users):
            os.environ.pop(name, None)
        comparison = compare.Comparison(compare.parse_options([]))
        comparison.look_at_load()
        assert comparison.report["waits_passively"] == decided
        assert (os.environ.get("OMP_WAIT_POLICY") == "passive") == decided
