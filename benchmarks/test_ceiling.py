"""How much of the machine's arithmetic each level uses."""

from benchmarks import ceiling
from benchmarks.throughput import Throughput


def test_ceiling(in_turns, keep, quick, data_flags):
    seconds = 0.2 if quick else 1.0
    rows = Throughput(ceiling.configurations(), seconds, data_flags)
    samples = in_turns(ceiling.contestants(rows, seconds), 2 if quick else 5)
    keep(ceiling.record(samples, rows.facts))
