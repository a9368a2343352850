"""Level 04's files on Hugging Face's Trainer: the same weights, log keys, and keys in trainer_state.json."""

import json

import pytest

from common.processes import ranks
from common.weights import max_weight_difference
from tests.levels import EXACT, changed_script, run_level
from tests.states import on_a_rank

pytestmark = pytest.mark.slow
FULL = "04_trainer/train_full"
OFFLINE = {"HF_HUB_OFFLINE": "1"}


@on_a_rank
def train(level, argv, path=None) -> tuple:
    return run_level(level, argv, path)


@pytest.mark.parametrize(
    ("level", "processes", "flags", "tolerance"),
    [
        (FULL, 1, [], 1e-9),
        (FULL, 1, ["--gradient-accumulation-steps", "3"], 1e-9),
        ("04_trainer", 2, ["--eval-samples", "24"], 0.0),
    ],
)
def test_level_04_runs_on_it_with_the_import_switched(level, processes, flags, tolerance, tmp_path, transformers):
    switched = changed_script(level, tmp_path, "common.trainer import", "transformers import")
    ours = ranks(processes).run(train, level, [*EXACT, *flags])
    theirs = ranks(processes).run(train, level, [*EXACT, *flags], switched, environment=OFFLINE)
    assert max_weight_difference(ours[0].weights, theirs[0].weights) <= tolerance
    for (result, _), (their_result, _) in zip(ours, theirs, strict=True):
        for key in ("steps", "evaluated", "accuracy", "world_size"):
            assert result[key] == their_result[key], key
        for key in ("loss", "eval_loss"):
            assert result[key] == pytest.approx(their_result[key], rel=1e-5), key  # theirs are summed in float32


def test_its_checkpoints_have_the_same_keys(tmp_path, transformers):
    switched = changed_script(FULL, tmp_path, "common.trainer import", "transformers import")
    states = []
    for folder, path in ((tmp_path / "ours", None), (tmp_path / "theirs", switched)):
        argv = [*EXACT, "--checkpoint-every", "2", "--checkpoint-dir", str(folder)]
        ranks(1).run(train, FULL, argv, path, environment=OFFLINE)
        states.append(json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text()))
    ours, theirs = states
    assert ours.keys() == theirs.keys()
    assert [entry.keys() for entry in ours["log_history"]] == [entry.keys() for entry in theirs["log_history"]]
