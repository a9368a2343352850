"""Checkpoints of the level scripts: killed while they save, damaged, without a disk to write to."""

import glob
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from common import ladder
from common.accelerator.utils.checkpoint_folder import CheckpointError, finish_and_verify
from tests.faults.jobs import MOUNTED, ON_LINUX, job, on_tmpfs, plain, run_to_end
from tests.levels import SHORT, run_level

LEVELS = ladder.with_checkpoints()
LONG = [pytest.param(level, marks=pytest.mark.long) for level in LEVELS]
# One step an epoch is one checkpoint of 14 MB.
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


def saving(folder: Path, every: int = 1) -> list[str]:
    return ["--checkpoint-dir", str(folder), "--checkpoint-every", str(every)]


def complete(folder: Path) -> list[Path]:
    """The checkpoints under `folder`, the newest last, whichever level wrote them."""
    found = [Path(path).parent for path in glob.glob(f"{folder}/**/manifest.json", recursive=True)]
    found = [path for path in found if re.fullmatch(r"checkpoint[-_]\d+", path.name)]
    return sorted(found, key=lambda path: int(re.split("[-_]", path.name)[1]))


def newest(folder: Path) -> int:
    """The number of the newest complete checkpoint."""
    return max((int(re.split("[-_]", path.name)[1]) for path in complete(folder)), default=-1)


@ON_LINUX
@pytest.mark.parametrize("level", LONG)
def test_killed_again_and_again_while_it_saves_a_run_ends_with_the_same_bits(level, tmp_path):
    training = [*SMALL, "--epochs", "30", "--seed", "7"]
    command = plain(level, *training, *saving(tmp_path / "c"), "--save", str(tmp_path / "w.pt"))
    reached = -1
    for files in (1, 3, 5, 0):  # of which the unfinished checkpoint consists when the process is killed
        with job(command) as run:

            def saves(files=files, reached=reached):
                staged = glob.glob(f"{tmp_path}/c/**/.*.staging*", recursive=True)
                return newest(tmp_path / "c") > reached + 1 and any(len(glob.glob(f"{d}/*")) >= files for d in staged)

            run.wait_for(saves)
            os.killpg(run.process.pid, signal.SIGKILL)
            assert run.end() == -signal.SIGKILL
            assert reached < 0 or re.search("[Rr]esumed at step", run.out)
        reached = newest(tmp_path / "c")
    done = run_to_end(command)
    assert done.returncode == 0, done.stderr
    straight = run_to_end(plain(level, *training, "--save", str(tmp_path / "straight.pt")))
    assert straight.returncode == 0, straight.stderr
    weights, others = (torch.load(tmp_path / name, weights_only=True) for name in ("w.pt", "straight.pt"))
    assert all(torch.equal(weights[name], others[name]) for name in others)


def cut_short(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def flip_a_bit(folder: Path) -> str:
    path = folder / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def put_a_foreign_one(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json"


def drop_the_progress(folder: Path) -> str:
    name = next(name for name in ("trainer_state.json", "custom_checkpoint_0.pkl") if (folder / name).exists())
    (folder / name).unlink()
    return name


DAMAGES = [cut_short, flip_a_bit, put_a_foreign_one, drop_the_progress]

DAMAGED = [
    (LEVELS[0], DAMAGES[0]),
    *(pytest.param(LEVELS[0], damage, marks=pytest.mark.slow) for damage in DAMAGES[1:]),
    *(pytest.param(LEVELS[1], damage, marks=pytest.mark.long) for damage in DAMAGES[:-1]),
    pytest.param(LEVELS[1], DAMAGES[-1], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("level, damage", DAMAGED)
def test_a_damaged_checkpoint_is_named_and_passed_over_for_the_one_before(level, damage, tmp_path, caplog, capsys):
    training = [*SHORT, "--epochs", "3"]  # six steps
    _, expected = run_level(level, training)
    run_level(level, [*SHORT, "--epochs", "2", *saving(tmp_path)])
    damaged = complete(tmp_path)[-1]
    name = damage(damaged)
    _, weights = run_level(level, [*training, *saving(tmp_path)])
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    (said,) = [record.getMessage() for record in warnings if record.name.startswith("common.")]
    assert "skipping a checkpoint: " in said and f"{damaged}/{name}" in said.replace(" holds no ", "/")
    assert re.search("[Rr]esumed at step (= )?3\n", capsys.readouterr().out)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert damaged not in complete(tmp_path)  # the run came to its number again, and beyond
    for each in complete(tmp_path):
        finish_and_verify(each)


@pytest.mark.parametrize("level", [pytest.param(LEVELS[0], marks=pytest.mark.slow), LONG[1]])
def test_where_all_checkpoints_are_damaged_nothing_is_begun_anew_and_nothing_touched(level, tmp_path):
    run_level(level, [*SHORT, *saving(tmp_path)])
    for each in complete(tmp_path):
        cut_short(each)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=f"there is no whole checkpoint in {tmp_path}"):
        run_level(level, [*SHORT, *saving(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before


@MOUNTED
@pytest.mark.parametrize("level", [pytest.param(LEVELS[0], marks=pytest.mark.slow), *LONG[1:]])
def test_where_the_disk_is_full_the_run_ends_and_goes_on_from_the_old_checkpoint(level, tmp_path):
    """40 MB take two checkpoints of 14 MB, which a third one must not replace before it is whole."""
    argv = [level, *SMALL, "--epochs", "5"]
    makes_room = ["rm", "-rf", *(f"{tmp_path}/{name}" for name in ("checkpoints/checkpoint_1", "checkpoint-1"))]
    goes_on = plain(*argv, *saving(tmp_path, every=999))
    done = run_to_end(on_tmpfs(tmp_path, "size=40m", plain(*argv, *saving(tmp_path)), makes_room, goes_on))
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["1", "0", "0"], done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    assert re.search("[Rr]esumed at step (= )?2\n", done.stdout)


@MOUNTED
@pytest.mark.slow
def test_a_full_disk_at_the_end_is_one_line_after_the_result(tmp_path):
    path = tmp_path / "end"
    full = ["sh", "-c", f"head -c 1M /dev/zero > {tmp_path}/rest; true"]
    done = run_to_end(
        on_tmpfs(tmp_path, "size=1m", full, plain("00_single_gpu", *SMALL, "--save", str(path)), ["ls", str(path)])
    )
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["0", "2", "2"], done.stdout + done.stderr
    assert "00_single_gpu: synthetic accuracy" in done.stdout
    assert f"error: {path} cannot be written: [Errno 28] No space left on device" in done.stderr.splitlines()
