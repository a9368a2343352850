"""The small abstractions train what the whole ones train: level 03 to the last bit, both levels as level 00 does."""

import pytest

from common.ladder.small import load_small
from common.processes import ranks
from common.weights import max_weight_difference
from tests.bits import differences
from tests.levels import EXACT, SHORT, level_00, run_level, run_module, run_on_ranks

TRAINING = [*SHORT, "--epochs", "2"]
TIMES = {"images_per_sec", "seconds"}


def run_small(level: str, argv: list[str]) -> tuple[dict, dict]:
    return run_module(load_small(level), argv)


def without_times(result: dict) -> dict:
    return {key: value for key, value in result.items() if key not in TIMES}


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_the_small_accelerator_trains_the_bits_of_the_whole_one(world_size):
    whole, expected = run_on_ranks("03_accelerate", world_size, TRAINING)
    of_ranks = ranks(world_size).run(run_small, "03_accelerate", TRAINING)
    _, weights = of_ranks[0]
    assert list(differences(weights, expected)) == []
    for (ours, _), theirs in zip(of_ranks, whole, strict=True):
        assert without_times(ours) == without_times(theirs)


@pytest.mark.parametrize("options", [[], pytest.param(["--num-workers", "1"], marks=pytest.mark.slow)])
def test_one_process_without_torchrun_is_a_group_of_one(options):
    whole, expected = run_level("03_accelerate", [*TRAINING, *options])
    small, weights = run_small("03_accelerate", [*TRAINING, *options])
    assert max_weight_difference(weights, expected) == 0
    assert (whole.pop("backend"), small.pop("backend")) == (None, "gloo")
    assert without_times(small) == without_times(whole)


@pytest.mark.parametrize(
    "level, world_size",
    [
        ("02_ddp_raw", 2),
        *(pytest.param("02_ddp_raw", world_size, marks=pytest.mark.slow) for world_size in (1, 3, 4)),
        *(pytest.param("03_accelerate", world_size, marks=pytest.mark.slow) for world_size in (2, 3)),
    ],
)
def test_levels_on_the_small_ones_train_the_weights_of_one_device(level, world_size):
    expected, weights_of_00 = level_00()
    of_ranks = ranks(world_size).run(run_small, level, EXACT)
    _, weights = of_ranks[0]
    assert max_weight_difference(weights, weights_of_00) <= 1e-9
    for result, _ in of_ranks:
        assert (result["evaluated"], result["accuracy"]) == (13, expected["accuracy"])
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-9)
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-9)
