"""Level 03 with its import switched to Hugging Face Accelerate is the same training run.

The levels agree in every number that the ladder compares, and in the backend.
"""

from pathlib import Path

import pytest

from common import ladder
from common.processes import ranks
from tests.levels import EXACT, farthest, run_on_ranks

pytest.importorskip("accelerate")
LEVEL = "03_accelerate"


def switched(rung: str, folder: Path) -> Path:
    """The script with its import switched to the real library."""
    script = ladder.script(rung)
    path = folder / LEVEL / script.name
    path.parent.mkdir()
    text = script.read_text()
    assert text.count("common.accelerator") >= 3
    path.write_text(text.replace("common.accelerator", "accelerate"))
    return path


@pytest.mark.parametrize("rung", [LEVEL, ladder.FULL])
def test_the_switched_file_uses_the_real_library(rung, tmp_path):
    real = ladder.load(rung, switched(rung, tmp_path))
    assert real.Accelerator.__module__ == "accelerate.accelerator"
    assert ladder.load(rung).Accelerator.__module__ == "common.accelerator.accelerator"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("rung, flags", [(LEVEL, []), (ladder.FULL, ["--gradient-accumulation-steps", "3"])])
def test_both_train_the_same_weights(rung, flags, world_size, tmp_path):
    argv = [*EXACT, *flags]
    (ours, *_), weights = run_on_ranks(rung, world_size, argv)
    (theirs, *_), others = run_on_ranks(rung, world_size, argv, switched(rung, tmp_path))
    ranks(world_size).stop()  # the real library's state outlives its run
    assert farthest(weights, others) <= 1e-9
    for key in ("world_size", "steps", "evaluated", "accuracy", "global_batch_size"):
        assert ours[key] == theirs[key], key
    assert (ours["backend"], theirs["backend"]) == ("gloo", "gloo")
    for key in ("loss", "eval_loss"):
        assert ours[key] == pytest.approx(theirs[key], abs=1e-9)
