"""All suites: a test for each row of a group, with its rounds for pytest-benchmark.

pytest-benchmark times one test after the other, so it cannot let rows take turns. A suite times its rows itself, a
whole group at the first of its tests. Each test then gives the seconds of its row to the plugin, whose options to sort,
group, save and compare work on them: the plugin reads `CLOCK` around each call of `CLOCK.advance`.
"""

import pytest

from benchmarks.harness.groups import seconds_per_step
from benchmarks.suites import network, one_step, overhead, throughput, timeline

TIMED = {
    "throughput": throughput.groups(),
    "overhead": overhead.groups(),
    "network": network.groups(),
    "timeline": timeline.groups(),
    "one_step": one_step.groups(),
}
ROWS = [
    pytest.param(suite, group, row, id=f"{suite}-{group.key}-{row}")
    for suite, groups in TIMED.items()
    for group in groups
    for row in group.rows
]


class GivenClock:
    """A clock that moves only by the seconds that it is given."""

    now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = GivenClock()
pytestmark = pytest.mark.timeout(3600)  # seconds: a group takes some minutes on two quiet cores


@pytest.mark.parametrize("suite, group, row", ROWS)
@pytest.mark.benchmark(timer=CLOCK.read)
def test_step(suite, group, row, record_of, benchmark):
    record = record_of(suite, group)
    if row not in record["rows"]:
        pytest.skip(f"{row} was not measured")
    benchmark.group = record["group"]
    durations = seconds_per_step(record, row)
    arguments = iter([((seconds,), {}) for seconds in durations])
    benchmark.pedantic(CLOCK.advance, setup=lambda: next(arguments), rounds=len(durations))
