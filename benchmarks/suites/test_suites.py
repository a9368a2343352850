"""All suites: a test for each row of a group.

The rows of a group take turns, which tests cannot: one runs after the other. So a suite measures a whole group for the
first of its tests, and each test replays the seconds of its row to pytest-benchmark, which reads REPLAY in place of the
time of day. So its table, and its options to sort, save and compare, work on what was measured.
"""

import pytest

from benchmarks.harness.groups import seconds_per_step
from benchmarks.suites import network, one_step, overhead, throughput, timeline

SUITES = {
    "throughput": throughput.groups(),
    "overhead": overhead.groups(),
    "network": network.groups(),
    "timeline": timeline.groups(),
    "one_step": one_step.groups(),
}
ROWS = [
    pytest.param(suite, group, row, id=f"{group.key}-{row}")
    for suite, groups in SUITES.items()
    for group in groups
    for row in group.rows
]


class Replay:
    """A clock that shows the seconds that were replayed so far."""

    now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


REPLAY = Replay()
pytestmark = pytest.mark.timeout(3600)  # seconds: a group takes some minutes on two quiet cores


@pytest.mark.parametrize("suite, group, row", ROWS)
@pytest.mark.benchmark(timer=REPLAY.read)
def test_step(suite, group, row, record_of, benchmark):
    record = record_of(suite, group)
    if row not in record["rows"]:
        pytest.skip(f"{row} was not measured")
    benchmark.group = record["group"]
    rounds = iter(seconds_per_step(record, row))
    benchmark.pedantic(lambda: REPLAY.advance(next(rounds)), rounds=record["rounds"])
