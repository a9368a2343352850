"""Random scripts end with the original's bits: loops over loaders, trainings, trainings by a Trainer.

The quick cases take a few scripts, the long ones as many as a release needs.
"""

from copy import copy
from dataclasses import replace

import pytest
import torch

from tests.bits import differences
from tests.parity.random_orders import ORDERS
from tests.parity.random_scripts import TIMEOUT, assert_same, run_on
from tests.parity.random_trainers import TRAINERS
from tests.parity.random_trainings import TRAININGS, Script
from tests.peers import import_or_skip

import_or_skip("accelerate")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(2 * TIMEOUT),
    # Random scripts step their schedules where torch advises otherwise.
    pytest.mark.filterwarnings("ignore:Detected call of"),
]


def cases(quick, long):
    """Numbers of scripts and of processes. Each argument has a number of scripts for each number of processes."""
    found = [pytest.param(number, processes) for processes, number in quick.items()]
    return found + [pytest.param(number, processes, marks=pytest.mark.long) for processes, number in long.items()]


@pytest.mark.parametrize(("number", "processes"), cases(quick={1: 30, 2: 15}, long={1: 1500, 2: 1000, 3: 1000}))
def test_loops_over_loaders_see_the_samples_and_draws_of_accelerate(number, processes, tmp_path):
    assert_same(ORDERS, range(number), processes, str(tmp_path))


@pytest.mark.parametrize(("number", "processes"), cases(quick={1: 12, 2: 4}, long={1: 300, 2: 200, 3: 60}))
def test_trainings_end_with_the_bits_of_accelerate(number, processes, tmp_path):
    assert_same(TRAININGS, range(number), processes, str(tmp_path))


def with_stop(script, processes, stateful):
    """The script with a stop anywhere in a window. Then a stateful loader goes on, or the script skips batches."""
    stopped_after = script.stopped_after or 3
    # All epochs together have more micro-batches, so that some are left.
    least = (stopped_after // script.epochs + 1) * script.batch_size * processes
    stopping = replace(
        script, stopped_after=stopped_after, stops_within_window=True, samples=max(script.samples, least)
    )
    stopping = replace(stopping, window="accumulate", skipped=0, passes_over=False, stateful=stateful)
    if script.precision == "bf16":
        stopping = replace(stopping, precision="fp16")  # Its loss scale is a state, too.
    if not stateful:
        # The batch that had been read ahead is read again, with other draws, and an unseeded order would be another.
        return replace(stopping, draws="nobody", order="seedable" if script.order == "shuffled" else script.order)
    if script.draws == "workers":
        return replace(stopping, draws="data set")  # A checkpoint has no states of workers.
    return stopping


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(("number", "processes"), cases(quick={1: 6, 2: 3}, long={1: 300, 2: 200}))
def test_a_resumed_training_ends_with_the_bits_of_one_that_was_not_stopped(number, processes, stateful, tmp_path):
    scripts = [with_stop(TRAININGS.draw(seed, processes), processes, stateful) for seed in range(number)]
    straight = [replace(script, stopped_after=None) for script in scripts]
    resumed = run_on(TRAININGS, TRAININGS.ours, scripts, processes, str(tmp_path))
    whole = run_on(TRAININGS, TRAININGS.ours, straight, processes, "")
    for script, of_ranks, whole_of_ranks in zip(scripts, resumed, whole, strict=True):
        for one, other in zip(of_ranks, whole_of_ranks, strict=True):
            assert "resumed" in one, script
            for name in ("weights", "states"):
                assert list(differences(one[name], other[name])) == [], (script, name)


@pytest.mark.parametrize(("number", "processes"), cases(quick={1: 6}, long={1: 200, 2: 200}))
def test_trainings_by_a_trainer_end_with_the_bits_of_transformers(number, processes, tmp_path, transformers):
    assert_same(TRAINERS, range(number), processes, str(tmp_path))


def test_a_script_that_fails_is_an_error_also_where_it_fails_on_both_libraries(tmp_path):
    failing = replace(TRAININGS, draw=lambda seed, processes: Script(precision="none"))
    with pytest.raises(ValueError, match="none"):
        assert_same(failing, range(1), 1, str(tmp_path))


def test_the_example_of_this_package_differs_as_it_was_drawn(tmp_path):
    as_drawn = replace(ORDERS, without_known_differences=copy)
    with pytest.raises(AssertionError, match=r"^script 4, Script\(.*: the ranks differ at \['1.loops.0.batches.5.0.3"):
        assert_same(as_drawn, range(4, 5), 2, str(tmp_path))


def test_a_bit_or_a_length_that_differs_is_found_and_nan_equals_nan():
    assert list(differences([{"bias": torch.ones(2)}], [{"bias": torch.tensor([1, 1 + 1e-7])}])) == ["0.bias"]
    assert list(differences([1, float("nan")], [1, float("nan"), None])) == ["2"]
