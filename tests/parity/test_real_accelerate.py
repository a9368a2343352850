"""Level 03 with its import switched to Hugging Face Accelerate is the same training run.

The levels agree in every number that the ladder compares, and in the backend.
"""

from pathlib import Path

import pytest

from common import ladder
from common.processes import RankFailed, ranks
from common.weights import max_weight_difference
from tests.levels import EXACT, FULL, changed_script, run_on_ranks, train_until_killed
from tests.peers import import_or_skip
from tests.states import forget_states

import_or_skip("accelerate")
LEVEL = "03_accelerate"
SLOW = pytest.mark.slow
LONG = pytest.mark.long


def switched(level: str, folder: Path) -> Path:
    return changed_script(level, folder, "common.accelerator", "accelerate")


@pytest.mark.parametrize("level", [LEVEL, FULL])
def test_the_switched_file_uses_the_real_library(level, tmp_path):
    real = ladder.load(level, switched(level, tmp_path))
    assert real.Accelerator.__module__ == "accelerate.accelerator"
    assert ladder.load(level).Accelerator.__module__ == "common.accelerator.accelerator"


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=LONG), pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("level, flags", [(LEVEL, []), (FULL, ["--gradient-accumulation-steps", "3"])])
def test_both_train_the_same_weights(level, flags, world_size, tmp_path):
    argv = [*EXACT, *flags]
    (ours, *_), weights = run_on_ranks(level, world_size, argv)
    (theirs, *_), others = run_on_ranks(level, world_size, argv, switched(level, tmp_path))
    ranks(world_size).run(forget_states)  # The real library's state outlives its run.
    assert max_weight_difference(weights, others) <= 1e-9
    for key in ("world_size", "steps", "evaluated", "accuracy", "global_batch_size"):
        assert ours[key] == theirs[key], key
    assert (ours["backend"], theirs["backend"]) == ("gloo", "gloo")
    for key in ("loss", "eval_loss"):
        assert ours[key] == pytest.approx(theirs[key], abs=1e-9)


@pytest.mark.parametrize(
    "world_size, step",  # Two epochs have 4 steps.
    [pytest.param(1, 2, marks=SLOW), pytest.param(2, 4, marks=LONG)],
)
def test_the_real_library_resumes_a_killed_training(world_size, step, tmp_path):
    """Without dropout: a resumed run draws one number more there. Ours is resumed in `tests/faults`."""
    argv = [*EXACT, "--gradient-accumulation-steps", "2"]
    path = switched(FULL, tmp_path)
    (straight, *_), weights = run_on_ranks(FULL, world_size, argv, path)
    saving = [*argv, "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1"]
    with pytest.raises(RankFailed):
        ranks(world_size).run(train_until_killed, step, FULL, saving, path)
    (resumed, *_), others = run_on_ranks(FULL, world_size, saving, path)
    ranks(world_size).run(forget_states)  # The real library's state outlives its run.
    assert max_weight_difference(weights, others) == 0
    assert resumed["steps"] == straight["steps"] == 4 and resumed["eval_loss"] == straight["eval_loss"]
