"""The levels under pytest-benchmark, for its tables and its comparisons of runs: a round is a training of STEPS steps.

The processes of a row are started, and import their level, in a round that does not count. The rows are timed one after
another, and each round includes the time before its first step. `python -m benchmarks throughput` leaves that time out,
and its rows take turns.
"""

import pytest
import torch

from benchmarks.harness.configurations import Configuration, Steps
from benchmarks.harness.level_runs import find_dataset
from benchmarks.suites.throughput import strong_scaling
from common.data.synthetic import SIZES

GLOBAL_BATCH = 64
ROUNDS = 5
# A training on a GPU takes an epoch, because 60 steps take less time there than the training needs to begin.
STEPS = SIZES["train"] // GLOBAL_BATCH if torch.cuda.is_available() else 60


@pytest.mark.benchmark(group=f"{STEPS} steps of {GLOBAL_BATCH} images")
@pytest.mark.parametrize("row", strong_scaling(GLOBAL_BATCH), ids=lambda row: row.name)
def test_training(row: Configuration, benchmark):
    steps = Steps(warm_up=0, counted=STEPS)
    benchmark.pedantic(row.run, args=(steps, find_dataset()), rounds=ROUNDS, warmup_rounds=1)
