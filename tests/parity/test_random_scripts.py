"""Random scripts end with the original's bits: loops over loaders, trainings, trainings by a Trainer.

The quick cases take a few scripts, the long ones as many as a release needs.
"""

from dataclasses import replace

import pytest

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


def cases(*rows):
    """The cases of rows of processes, scripts of the quick case (0: there is none), and scripts of the long one."""
    found = []
    for processes, quick, long in rows:
        if quick:
            found.append(pytest.param(quick, processes))
        found.append(pytest.param(long, processes, marks=pytest.mark.long))
    return found


@pytest.mark.parametrize(("number", "processes"), cases((1, 60, 1500), (2, 40, 1000), (3, 0, 1000)))
def test_loops_over_loaders_see_the_samples_and_draws_of_accelerate(number, processes, tmp_path):
    assert_same(ORDERS, range(number), processes, str(tmp_path))


@pytest.mark.parametrize(("number", "processes"), cases((1, 25, 300), (2, 6, 200), (3, 0, 60)))
def test_trainings_end_with_the_bits_of_accelerate(number, processes, tmp_path):
    assert_same(TRAININGS, range(number), processes, str(tmp_path))


def with_stop(script, stateful):
    """The script with a stop anywhere in a window. Then a stateful loader goes on, or the script skips batches.

    Skipping reads again the batch that had been read ahead: a draw would be repeated, and an order without a seed
    would be another one.
    """
    changes = {"stopped_after": script.stopped_after or 3, "stops_within_window": True, "window": "accumulate"}
    changes |= {"skipped": 0, "passes_over": False, "stateful": stateful}
    if script.precision == "bf16":
        changes["precision"] = "fp16"  # Its loss scale is a state, too.
    if not stateful:
        changes["draws"] = "nobody"
        if script.order == "shuffled":
            changes["order"] = "seedable"
    elif script.draws == "workers":
        changes["draws"] = "data set"
    return replace(script, **changes)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(("number", "processes"), cases((1, 10, 300), (2, 5, 200)))
def test_a_resumed_training_ends_with_the_bits_of_one_that_was_not_stopped(number, processes, stateful, tmp_path):
    scripts = [with_stop(TRAININGS.draw(seed, processes), stateful) for seed in range(number)]
    straight = [replace(script, stopped_after=None) for script in scripts]
    resumed = run_on(TRAININGS, TRAININGS.ours, scripts, processes, str(tmp_path))
    whole = run_on(TRAININGS, TRAININGS.ours, straight, processes, "")
    for script, of_ranks, whole_of_ranks in zip(scripts, resumed, whole, strict=True):
        for one, other in zip(of_ranks, whole_of_ranks, strict=True):
            for name in ("weights", "states"):
                assert list(differences(one[name], other[name])) == [], (script, name)


@pytest.mark.parametrize(("number", "processes"), cases((1, 10, 200), (2, 0, 200)))
def test_trainings_by_a_trainer_end_with_the_bits_of_transformers(number, processes, tmp_path, transformers):
    assert_same(TRAINERS, range(number), processes, str(tmp_path))


def test_a_script_that_fails_is_an_error_also_where_it_fails_on_both_libraries(tmp_path):
    failing = replace(TRAININGS, draw=lambda seed, processes: Script(precision="none"))
    with pytest.raises(ValueError, match="none"):
        assert_same(failing, range(1), 1, str(tmp_path))


def run_with_another_bit(library, script, folder, seen):
    TRAININGS.run(library, script, folder, seen)
    if library == TRAININGS.theirs:
        seen["weights"][0]["0.bias"][0] *= 1 + 1e-7


def test_a_bit_that_differs_is_found_and_its_script_is_shown(tmp_path):
    differing = replace(TRAININGS, run=run_with_another_bit)
    with pytest.raises(AssertionError) as error:
        assert_same(differing, range(1), 1, str(tmp_path))
    assert str(error.value).startswith("script 0, Script(samples=")
    assert "the ranks differ at ['0.weights.0.0.bias']" in str(error.value)


def test_an_outcome_that_is_longer_differs_and_nan_equals_nan():
    assert list(differences([1, float("nan")], [1, float("nan"), None])) == ["2"]
