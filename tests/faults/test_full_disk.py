"""A disk is full: for a checkpoint, for the final weights, or for what loader workers share."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import ladder
from tests.jobs import level_command, resumed_at, run_to_end

LEVEL_03, LEVEL_04 = ladder.WITH_CHECKPOINTS
# An epoch has two steps. A checkpoint has 14 MB.
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]
WORKERS = Path(__file__).parent / "loader_workers.py"


def run_on_small_disk(folder: Path, size: str, *commands: list[str]) -> tuple[list[int], subprocess.CompletedProcess]:
    """Run `commands` one after another on a disk at `folder`. Returns their exit codes, and the whole output.

    The disk is in a mount namespace of its own, and goes with the last process in it.
    """
    mount = f"mount -t tmpfs -o size={size} none {shlex.quote(str(folder))}"
    in_namespace = ["unshare", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*in_namespace, mount], capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root on Linux")
    program = " ; ".join(f"{shlex.join(command)} ; echo code $?" for command in commands)
    done = run_to_end([*in_namespace, f"{mount} && {{ {program} ; }}"])
    return [int(code) for code in re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE)], done


@pytest.mark.parametrize(
    "level", [pytest.param(LEVEL_03, marks=pytest.mark.slow), pytest.param(LEVEL_04, marks=pytest.mark.long)]
)
def test_a_full_disk_leaves_the_old_checkpoint(level, tmp_path):
    """40 MB take two checkpoints of 14 MB, which a third one must not replace before it is whole."""
    argv = [level, *SMALL, "--epochs", "5", "--checkpoint-dir", str(tmp_path), "--checkpoint-every"]
    makes_room = ["rm", "-rf", *(f"{tmp_path}/{name}" for name in ("checkpoints/checkpoint_1", "checkpoint-1"))]
    goes_on = level_command(*argv, "999")
    codes, done = run_on_small_disk(tmp_path, "40m", level_command(*argv, "1"), makes_room, goes_on)
    assert codes == [1, 0, 0], done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    assert resumed_at(done.stdout) == [2]


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_one_line_after_the_result(tmp_path):
    path = tmp_path / "end"
    fills = ["sh", "-c", f"head -c 1M /dev/zero > {tmp_path}/rest; true"]  # `head` fails: not all of it fits.
    training = level_command("00_single_gpu", *SMALL, "--save", str(path))
    codes, done = run_on_small_disk(tmp_path, "1m", fills, training, ["test", "-e", str(path)])
    assert codes == [0, 2, 1], "no half of a file stays\n" + done.stdout + done.stderr
    assert "00_single_gpu: synthetic accuracy" in done.stdout
    assert f"error: {path} cannot be written: [Errno 28] No space left on device" in done.stderr.splitlines()


@pytest.mark.slow
def test_loader_workers_without_shared_memory_end_the_training():
    """Torch would share a batch in a thread of the worker. If that fails, the training waits for ever."""
    (code,), done = run_on_small_disk(Path("/dev/shm"), "2m", [sys.executable, str(WORKERS)])
    assert code != 0
    assert "No space left on device" in done.stderr
