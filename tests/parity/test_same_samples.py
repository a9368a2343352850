"""Every level reads the same samples at the same step, whatever the number of processes; dropout is each rank's own."""

import os

import pytest
import torch

from common import ladder
from common.args import parse_args
from common.process_group import is_distributed
from common.processes import ranks
from common.settings import fit_to_machine
from tests.levels import BATCH, SAMPLES, SHORT
from tests.states import forget_states
from tests.toys import seeded_order

STEPS = SAMPLES // BATCH  # An epoch drops the rest.
EPOCHS = 2
SEED = 5
FLAGS = [*SHORT, "--epochs", str(EPOCHS), "--seed", str(SEED)]


def train_and_note(level: str) -> tuple[list[list[int]], int]:
    """Train. Returns the samples' indices of each training batch of this process, and the seed of its dropout."""
    forget_states()  # A level has run in this process before.
    module = ladder.load(level)
    load = module.load_data
    batches = []

    def load_data(args):
        # Else each rank would look for the data by itself, and one might find others.
        assert is_distributed() or os.environ.get("WORLD_SIZE", "1") == "1"
        train_set, test_set = load(args)
        get_batch = train_set.__getitems__

        def note_and_get(indices):
            batches.append(list(indices))
            return get_batch(indices)

        train_set.__getitems__ = note_and_get  # A DataLoader calls it.
        return train_set, test_set

    module.load_data = load_data
    module.train(fit_to_machine(parse_args(module.__file__, FLAGS)))
    return batches, torch.initial_seed()


def expected_steps() -> list[set[int]]:
    steps = []
    for epoch in range(EPOCHS):
        order = seeded_order(SAMPLES, SEED, epoch)
        steps += [set(order[step * BATCH : (step + 1) * BATCH]) for step in range(STEPS)]
    return steps


@pytest.mark.parametrize("level", ["00_single_gpu", "01_data_parallel"])
def test_one_process_sees_the_seeded_permutation(level):
    seen, _ = train_and_note(level)
    assert all(len(batch) == BATCH for batch in seen)
    assert [set(batch) for batch in seen] == expected_steps()


@pytest.mark.parametrize("level", ladder.DISTRIBUTED)
@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_ranks_together_see_the_seeded_permutation(level, world_size):
    by_rank, seeds = zip(*ranks(world_size).run(train_and_note, level), strict=True)
    assert seeds == tuple(range(SEED, SEED + world_size))
    for step, expected in enumerate(expected_steps()):
        shards = [seen[step] for seen in by_rank]
        assert all(len(shard) == BATCH // world_size for shard in shards)
        assert set().union(*shards) == expected
