"""All suites: a test for each row of a group, whose rounds are the seconds that its step took in each round.

The first test of a group measures all of its rows, in turns, which pytest-benchmark cannot: it times one test after the
other. So each test replays what a step of its row took, on a clock that moves by these times alone. Then the plugin's
options to sort, group, save and compare work on rows.
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
replayed: list[float] = []  # seconds

pytestmark = pytest.mark.timeout(3600)  # seconds: a group takes some minutes on two quiet cores


@pytest.mark.parametrize("suite, group, row", ROWS)
@pytest.mark.benchmark(timer=lambda: sum(replayed))
def test_step(suite, group, row, record_of, benchmark, options):
    record = record_of(suite, group)
    if row not in record["rows"]:
        pytest.skip(f"{row} was not measured")
    benchmark.group = record["group"]
    pairs = [pair for pair in record["pairs"] if pair["of"] == row]
    benchmark.extra_info.update(record["rows"][row] | {"unit": record["unit"], "pairs": pairs})
    durations = seconds_per_step(record, row)
    next_duration = iter(durations)
    benchmark.pedantic(lambda: replayed.append(next(next_duration)), rounds=len(durations))
