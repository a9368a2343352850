"""Checkpoints of the level scripts: killed while they save, damaged, without a disk to write to, wanted by two jobs."""

import glob
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from common.accelerator.checkpointing import CheckpointError
from tests.faults.jobs import MOUNTED, ON_LINUX, job, on_tmpfs, run_to_end, script, torchrun
from tests.levels import SHORT, run_level

LEVELS = ["03_accelerate", "04_trainer"]
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


def plain(level: str, *argv: str) -> list[str]:
    """The level as one process."""
    return [torchrun()[0], script(level), *argv]


@ON_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_killed_again_and_again_while_it_saves_a_run_ends_with_the_same_bits(level, tmp_path):
    training = [*SMALL, "--epochs", "30", "--seed", "7"]
    command = plain(level, *training, *saving(tmp_path / "c"), "--save", str(tmp_path / "w.pt"))
    reached = -1
    for files in (1, 3, 5, 0):  # of which the unfinished checkpoint consists when the process is killed
        with job(command) as run:

            def saves(files=files, reached=reached):
                drafts = glob.glob(f"{tmp_path}/c/**/.*.tmp", recursive=True)
                return newest(tmp_path / "c") > reached + 1 and any(len(glob.glob(f"{d}/*")) >= files for d in drafts)

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


DAMAGES = [cut_short, flip_a_bit, put_a_foreign_one]


@pytest.mark.parametrize("damage", [DAMAGES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DAMAGES[1:])])
def test_level_03_skips_a_damaged_checkpoint_for_the_one_before_and_says_so(damage, tmp_path, caplog, capsys):
    _, expected = run_level("03_accelerate", [*SHORT, "--epochs", "2"])
    run_level("03_accelerate", [*SHORT, "--epochs", "2", *saving(tmp_path), "--max-steps", "3"])
    name = damage(complete(tmp_path)[-1])
    _, weights = run_level("03_accelerate", [*SHORT, "--epochs", "2", *saving(tmp_path)])
    assert "skipping a checkpoint: " in caplog.text and f"checkpoint_2/{name}" in caplog.text.replace(" holds no ", "/")
    assert "03_accelerate: resumed at step 2\n" in capsys.readouterr().out
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_level_04_refuses_a_damaged_checkpoint_by_name_and_goes_on_without_it(damage, tmp_path, capsys):
    run_level("04_trainer", [*SHORT, "--epochs", "2", *saving(tmp_path), "--max-steps", "3"])
    newest = complete(tmp_path)[-1]
    name = damage(newest)
    with pytest.raises(CheckpointError, match=rf"checkpoint-3.*{name}"):
        run_level("04_trainer", [*SHORT, "--epochs", "2", *saving(tmp_path)])
    shutil.rmtree(newest)
    run_level("04_trainer", [*SHORT, "--epochs", "2", *saving(tmp_path)])
    assert "Resumed at step = 2\n" in capsys.readouterr().out


@MOUNTED
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_from_the_old_checkpoint(level, tmp_path):
    """40 MB take two checkpoints of 14 MB, which a third one must not replace before it is whole."""
    argv = [script(level), *SMALL, "--epochs", "5"]
    fails, goes_on = torchrun(*argv, *saving(tmp_path)), torchrun(*argv, *saving(tmp_path, every=999))
    makes_room = ["rm", "-rf", *(f"{tmp_path}/{name}" for name in ("checkpoints/checkpoint_0", "checkpoint-1"))]
    done = run_to_end(on_tmpfs(tmp_path, "size=40m", fails, makes_room, goes_on))
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["1", "0", "0"], done.stdout + done.stderr
    assert re.search(rf"OSError: \[Errno 28\] No space left on device: '{tmp_path}/\S+'", done.stderr)
    assert re.search("[Rr]esumed at step (= )?2\n", done.stdout)


@MOUNTED
@pytest.mark.slow
def test_a_read_only_checkpoint_folder_is_one_line_before_the_training(tmp_path):
    done = run_to_end(on_tmpfs(tmp_path, "ro", *(torchrun(script(lv), *SMALL, *saving(tmp_path)) for lv in LEVELS)))
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["1", "1"]
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    wanted = f"error: --checkpoint-dir cannot be written to: [Errno 30] Read-only file system: '{tmp_path}/.lock'"
    assert said == [wanted] * 2


@ON_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_second_job_on_the_folder_of_a_first_is_refused_and_does_not_disturb_it(level, tmp_path):
    command = torchrun(script(level), *SMALL, "--epochs", "60", *saving(tmp_path))
    with job(command) as first:
        first.wait_for(lambda: complete(tmp_path))
        second = run_to_end(command)
        assert first.process.poll() is None, "the first job ended too soon to be disturbed"
        assert first.end() == 0, first.err
    assert second.returncode != 0 and "Resumed" not in second.stdout
    said = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: another job is saving to {tmp_path}: wait for it, or name another --checkpoint-dir"]
