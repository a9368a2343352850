"""Checkpoints of the level scripts: damaged, or without a disk to write to."""

from pathlib import Path

import pytest

from common import ladder
from common.accelerator.utils.checkpoint_folder import CheckpointError, finish_and_verify
from common.weights import max_weight_difference
from tests.bits import flip_a_bit
from tests.jobs import complete_checkpoints, level_command, newest_checkpoint, on_tmpfs, resumed_at, run_to_end
from tests.levels import SHORT, run_level

LEVEL_03, LEVEL_04 = ladder.WITH_CHECKPOINTS
SLOW_03 = pytest.param(LEVEL_03, marks=pytest.mark.slow)
SLOW_04 = pytest.param(LEVEL_04, marks=pytest.mark.slow)
LONG_04 = pytest.param(LEVEL_04, marks=pytest.mark.long)
# One step an epoch is one checkpoint of 14 MB.
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


def exit_codes(printed: str) -> list[int]:
    """The lines "code N" of `on_tmpfs`, one for each command."""
    return [int(line.removeprefix("code ")) for line in printed.splitlines() if line.startswith("code ")]


def saving(folder: Path, every: int = 1) -> list[str]:
    return ["--checkpoint-dir", str(folder), "--checkpoint-every", str(every)]


@pytest.mark.parametrize("level", [LEVEL_03, SLOW_04])
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
    with pytest.raises(CheckpointError, match=f"there is no complete and undamaged checkpoint in {tmp_path}"):
        run_level(level, [*SHORT, *saving(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.parametrize("level", [SLOW_03, LONG_04])
def test_a_full_disk_leaves_the_old_checkpoint(level, tmp_path):
    """40 MB take two checkpoints of 14 MB, which a third one must not replace before it is whole."""
    argv = [level, *SMALL, "--epochs", "5"]
    makes_room = ["rm", "-rf", *(f"{tmp_path}/{name}" for name in ("checkpoints/checkpoint_1", "checkpoint-1"))]
    goes_on = level_command(*argv, *saving(tmp_path, every=999))
    done = run_to_end(on_tmpfs(tmp_path, "size=40m", level_command(*argv, *saving(tmp_path)), makes_room, goes_on))
    assert exit_codes(done.stdout) == [1, 0, 0], done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    assert resumed_at(done.stdout) == [2]


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.slow
def test_a_full_disk_at_the_end_is_one_line_after_the_result(tmp_path):
    path = tmp_path / "end"
    full = ["sh", "-c", f"head -c 1M /dev/zero > {tmp_path}/rest; true"]
    training = level_command("00_single_gpu", *SMALL, "--save", str(path))
    done = run_to_end(on_tmpfs(tmp_path, "size=1m", full, training, ["ls", str(path)]))
    assert exit_codes(done.stdout) == [0, 2, 2], done.stdout + done.stderr
    assert "00_single_gpu: synthetic accuracy" in done.stdout
    assert f"error: {path} cannot be written: [Errno 28] No space left on device" in done.stderr.splitlines()
