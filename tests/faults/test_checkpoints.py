"""Damaged checkpoints of the level scripts."""

from pathlib import Path

import pytest

from common import ladder
from common.accelerator.utils.checkpoint_folder import CheckpointError, finish_and_verify
from common.weights import max_weight_difference
from tests.bits import flip_a_bit
from tests.jobs import complete_checkpoints, newest_checkpoint, resumed_at
from tests.levels import SHORT, run_level

LEVEL_03, LEVEL_04 = ladder.WITH_CHECKPOINTS
SLOW_03 = pytest.param(LEVEL_03, marks=pytest.mark.slow)
LONG_04 = pytest.param(LEVEL_04, marks=pytest.mark.long)


def saving(folder: Path) -> list[str]:
    return ["--checkpoint-dir", str(folder), "--checkpoint-every", "1"]


@pytest.mark.parametrize("level", [LEVEL_03, pytest.param(LEVEL_04, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_passed_over(level, tmp_path, caplog, capsys):
    training = [*SHORT, "--epochs", "3"]  # These are six steps.
    _, expected = run_level(level, training)
    run_level(level, [*SHORT, "--epochs", "2", *saving(tmp_path)])
    damaged = complete_checkpoints(tmp_path)[newest_checkpoint(tmp_path)] / "optimizer.bin"
    flip_a_bit(damaged)
    _, weights = run_level(level, [*training, *saving(tmp_path)])
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    (warning,) = [record.getMessage() for record in warnings if record.name.startswith("common.")]
    assert "skipping a checkpoint: " in warning and str(damaged) in warning
    assert resumed_at(capsys.readouterr().out) == [3]
    assert max_weight_difference(weights, expected) == 0
    for each in complete_checkpoints(tmp_path).values():
        finish_and_verify(each)


@pytest.mark.parametrize("level", [SLOW_03, LONG_04])
def test_without_a_whole_checkpoint_nothing_is_touched(level, tmp_path):
    run_level(level, [*SHORT, *saving(tmp_path)])
    for each in complete_checkpoints(tmp_path).values():
        flip_a_bit(each / "model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    none_is_left = f"there is no complete and undamaged checkpoint in {tmp_path}.*; .*model.safetensors"
    with pytest.raises(CheckpointError, match=none_is_left):
        run_level(level, [*SHORT, *saving(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before
