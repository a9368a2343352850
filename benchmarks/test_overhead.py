"""What an abstraction adds to a training step."""

from benchmarks import overhead


def test_overhead_per_step(in_turns, keep, quick, one_thread):
    samples = in_turns(overhead.contestants(), 3 if quick else 15)
    keep(overhead.summary(samples) | {"skipped": overhead.skipped()})
