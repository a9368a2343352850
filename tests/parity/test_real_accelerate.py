"""Level 03 with its import switched to Hugging Face Accelerate is the same training run.

The levels agree in every number that the ladder compares. One deliberate difference shows: the real library joins a
process group for a single process too, ours needs none. Another would, if the ladder did not drop the tail of an epoch:
the real library divides a window that the end of the loader cuts short by the size of a whole one.
"""

import pytest

from common import ladder
from tests.levels import EXACT, farthest, run_on_ranks
from tests.workers import ranks

pytest.importorskip("accelerate")
LEVEL = "03_accelerate"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / LEVEL / "train.py"
    path.parent.mkdir()
    text = ladder.script(LEVEL).read_text()
    assert text.count("common.accelerator") >= 3
    path.write_text(text.replace("common.accelerator", "accelerate"))
    return path


def _uses(path) -> str:
    return ladder.load(LEVEL, path).Accelerator.__module__


def test_the_switched_file_uses_the_real_library(real):
    assert _uses(real) == "accelerate.accelerator" and _uses(None) == "common.accelerator.accelerator"


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("accumulation", [[], ["--gradient-accumulation-steps", "3"]], ids=["whole", "accumulated"])
def test_both_train_the_same_weights(real, world_size, accumulation):
    argv = [*EXACT, *accumulation]
    (ours, *_), weights = run_on_ranks(LEVEL, world_size, argv)
    (theirs, *_), others = run_on_ranks(LEVEL, world_size, argv, real)
    ranks(world_size).stop()  # the real library's state outlives its run
    assert farthest(weights, others) <= 1e-9
    for key in ("world_size", "steps", "evaluated", "accuracy", "global_batch_size"):
        assert ours[key] == theirs[key], key
    assert (ours["backend"], theirs["backend"]) == (None if world_size == 1 else "gloo", "gloo")
    for key in ("loss", "eval_loss"):
        assert ours[key] == pytest.approx(theirs[key], abs=1e-9)
