"""What a batch costs before it is trained on."""

from benchmarks import loading
from benchmarks.throughput import Configuration, Throughput


def test_loading(in_turns, keep, quick, data_flags):
    step = Throughput(
        [Configuration("00_single_gpu", batch_size=loading.BATCH_SIZE)], 0.2 if quick else 1.0, data_flags
    )
    ((name, images_per_sec),) = step.contestants.items()
    contestants = loading.contestants(data_flags, 20 if quick else 100)
    contestants[loading.STEP] = lambda: 1000 * loading.BATCH_SIZE / images_per_sec()
    samples = in_turns(contestants, 2 if quick else 5)
    keep(loading.record(samples, {loading.STEP: step.facts[name]}))
