"""Checkpoints of the level scripts: killed while they save, damaged, without a disk to write to."""

import glob
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from common import ladder
from common.accelerator.utils.checkpoint_folder import CheckpointError, finish_and_verify
from common.weights import farthest
from tests.bits import flip_a_bit
from tests.jobs import (
    ON_LINUX,
    complete_checkpoints,
    job,
    level_command,
    newest_checkpoint,
    on_tmpfs,
    run_to_end,
)
from tests.levels import SHORT, run_level

LEVEL_03, LEVEL_04 = ladder.WITH_CHECKPOINTS
SLOW_03 = pytest.param(LEVEL_03, marks=pytest.mark.slow)
SLOW_04 = pytest.param(LEVEL_04, marks=pytest.mark.slow)
LONG_03 = pytest.param(LEVEL_03, marks=pytest.mark.long)
LONG_04 = pytest.param(LEVEL_04, marks=pytest.mark.long)
# One step an epoch is one checkpoint of 14 MB.
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


def saving(folder: Path, every: int = 1) -> list[str]:
    return ["--checkpoint-dir", str(folder), "--checkpoint-every", str(every)]


# The moments of a kill, each with the number of files that the save has written by then.
MOMENTS = {"it has begun": 0, "the first file is there": 1, "some are there": 3, "most are there": 5}


def is_saving(folder: Path, after: int, least_files: int) -> bool:
    """True if checkpoint number `after` is complete, and a later one has at least so many files."""
    unfinished = glob.glob(f"{folder}/**/.*.draft_*", recursive=True)
    most_files = max((len(glob.glob(f"{path}/*")) for path in unfinished), default=-1)
    return newest_checkpoint(folder) >= after and most_files >= least_files


@ON_LINUX
@pytest.mark.parametrize("level", [LONG_03, LONG_04])
def test_killed_while_it_saves_a_run_ends_with_the_same_bits(level, tmp_path):
    training = [*SMALL, "--epochs", "30", "--seed", "7"]
    command = level_command(level, *training, *saving(tmp_path / "c"), "--save", str(tmp_path / "w.pt"))
    complete = -1  # The number of the newest checkpoint that the run before has left.
    for moment, files in MOMENTS.items():
        with job(command) as run:
            run.wait_for(partial(is_saving, tmp_path / "c", after=complete + 2, least_files=files))
            os.killpg(run.processes[0].pid, signal.SIGKILL)
            assert run.end() == [-signal.SIGKILL]
            assert complete < 0 or re.search("[Rr]esumed at step", run.out), moment
        complete = newest_checkpoint(tmp_path / "c")
    done = run_to_end(command)
    assert done.returncode == 0, done.stderr
    straight = run_to_end(level_command(level, *training, "--save", str(tmp_path / "straight.pt")))
    assert straight.returncode == 0, straight.stderr
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert farthest(weights, torch.load(tmp_path / "straight.pt", weights_only=True)) == 0


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
    assert re.search("[Rr]esumed at step (= )?3\n", capsys.readouterr().out)
    assert farthest(weights, expected) == 0
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
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["1", "0", "0"], done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    assert re.search("[Rr]esumed at step (= )?2\n", done.stdout)


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.slow
def test_a_full_disk_at_the_end_is_one_line_after_the_result(tmp_path):
    path = tmp_path / "end"
    full = ["sh", "-c", f"head -c 1M /dev/zero > {tmp_path}/rest; true"]
    training = level_command("00_single_gpu", *SMALL, "--save", str(path))
    done = run_to_end(on_tmpfs(tmp_path, "size=1m", full, training, ["ls", str(path)]))
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["0", "2", "2"], done.stdout + done.stderr
    assert "00_single_gpu: synthetic accuracy" in done.stdout
    assert f"error: {path} cannot be written: [Errno 28] No space left on device" in done.stderr.splitlines()
