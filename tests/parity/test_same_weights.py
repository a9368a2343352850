"""Every level, at every world size, is the same training run."""

from functools import cache

import pytest

from common import ladder
from common.weights import max_weight_difference
from tests.levels import EXACT, FSDP, SHORT, changed_script, level_00, run_level, run_on_ranks

TOLERANCE = 1e-9
SLOW = pytest.mark.slow


@cache
def exact_training(level: str, world_size: int) -> tuple[list[dict], dict]:
    return run_on_ranks(level, world_size, EXACT)


@pytest.mark.parametrize("replicas", [2, *(pytest.param(n, marks=SLOW) for n in (1, 3, 4))])
def test_data_parallel_trains_the_weights_of_one_device(replicas):
    result, weights = run_level("01_data_parallel", [*EXACT, "--replicas", str(replicas)])
    assert max_weight_difference(weights, level_00().weights) <= TOLERANCE
    assert_same_numbers(result, level_00().result)


@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=SLOW) for n in (1, 3, 4)), 2])
def test_distributed_levels_train_the_weights_of_one_device(world_size):
    for level in ladder.DISTRIBUTED:
        results, weights = exact_training(level, world_size)
        assert max_weight_difference(weights, level_00().weights) <= TOLERANCE, level
        for result in results:
            assert_same_numbers(result, level_00().result)


def mesh(world_size: int, tensor: int, *marks):
    return pytest.param(ladder.MESH, world_size, ["--tensor", str(tensor)], marks=marks)


@pytest.mark.parametrize(
    "level, world_size, flags",
    [
        (ladder.FSDP, 2, []),
        *(pytest.param(ladder.FSDP, n, [], marks=SLOW) for n in (1, 3, 4)),
        mesh(4, 2),
        *(mesh(n, tensor, SLOW) for n, tensor in ((2, 2), (3, 1), (4, 4))),
        *(mesh(n, tensor, pytest.mark.long) for n, tensor in ((1, 1), (2, 1))),
    ],
)
def test_a_network_that_is_shared_out_trains_the_weights_of_one_device(level, world_size, flags):
    """It also evaluates each of 13 samples once: some ranks have one more than others, or a batch more."""
    results, weights = run_on_ranks(level, world_size, [*EXACT, *flags])
    assert max_weight_difference(weights, level_00().weights) <= TOLERANCE
    for result in results:
        assert_same_numbers(result, level_00().result)
    if level == ladder.FSDP and world_size == 2:
        assert max_weight_difference(weights, exact_training("02_ddp_raw", 2)[1]) == 0, "the bits of DDP"


def test_a_single_sample_is_evaluated_once_by_three_ranks():
    results, _ = run_on_ranks(ladder.FSDP, 3, [*EXACT, "--epochs", "1", "--eval-samples", "1"])
    assert [result["evaluated"] for result in results] == [1] * 3


MIXED_ROWS = [
    ("train_set, num_rows, row, seed", "train_set, seed"),  # The ranks of a row get different samples.
    ("args.seed + row)", "args.seed + dist.get_rank())"),  # The ranks of a row drop differently.
]


@pytest.mark.slow
def test_a_mesh_that_is_not_kept_apart_trains_other_weights(tmp_path):
    flags = [*SHORT, "--dtype", "float64", "--tensor", "2"]  # Dropout is on.
    _, weights = run_on_ranks(ladder.MESH, 4, flags)
    for number, change in enumerate(MIXED_ROWS):
        path = changed_script(ladder.MESH, tmp_path / str(number), *change)
        _, others = run_on_ranks(ladder.MESH, 4, flags, path)
        assert max_weight_difference(weights, others) > 1e-6, change


@pytest.mark.parametrize("level", ["03_accelerate", "04_trainer"])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=SLOW) for n in (1, 3, 4))])
def test_a_model_that_is_shared_out_trains_the_weights_of_one_device(world_size, level):
    results, weights = run_on_ranks(level, world_size, EXACT, environment=FSDP)
    assert max_weight_difference(weights, level_00().weights) <= TOLERANCE
    for result in results:
        assert_same_numbers(result, level_00().result)
    if world_size == 2:
        assert max_weight_difference(weights, exact_training(level, world_size)[1]) == 0, "the bits of DDP"


@SLOW
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_accumulated_micro_batches_train_the_weights_of_whole_batches(world_size):
    """36 samples a step in three micro-batches on every rank; 62 samples are one step and a tail."""
    larger = [*EXACT, "--train-samples", "62", "--batch-size", "36"]  # The last value of a flag counts.
    whole, expected = run_level("00_single_gpu", larger)
    for level in ladder.WITH_CHECKPOINTS:
        results, weights = run_on_ranks(level, world_size, [*larger, "--gradient-accumulation-steps", "3"])
        assert max_weight_difference(weights, expected) <= TOLERANCE, level
        assert results[0]["steps"] == whole["steps"] == 2


def test_the_weights_have_moved_and_depend_on_a_single_sample(tmp_path):
    _, start = run_level("00_single_gpu", [*EXACT, "--lr", "1e-12"])
    assert max_weight_difference(start, level_00().weights) > 1e-3

    load = "train_set, test_set = load_data(args)\n"
    swap = "    train_set.images[17] = test_set.images[0]\n"
    path = changed_script("00_single_gpu", tmp_path, load, load + swap)
    result, weights = run_level("00_single_gpu", EXACT, path)
    assert result["steps"] == level_00().result["steps"]
    assert max_weight_difference(weights, level_00().weights) > 1e-6 > TOLERANCE


def assert_same_numbers(result: dict, expected: dict) -> None:
    for key in ("steps", "evaluated", "accuracy", "dataset", "global_batch_size"):
        assert result[key] == expected[key], key
    # A Trainer adds up the losses that it logs in float32.
    tolerance = {"loss": 1e-6 if result["level"] == "04_trainer" else 1e-9, "eval_loss": 1e-9}
    for key, most in tolerance.items():
        assert result[key] == pytest.approx(expected[key], abs=most), key
