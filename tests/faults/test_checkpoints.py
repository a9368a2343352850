"""Checkpoints of the level scripts: killed while they save, damaged, without a disk to write to, wanted by two jobs."""

import contextlib
import glob
import io
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from common.run.checkpointing import file_errors_in_one_line

from common import ladder
from common.accelerator import Accelerator, checkpointing
from common.accelerator.state import PartialState
from common.errors import UserError
from common.processes import ranks
from tests.faults.jobs import MOUNTED, ON_LINUX, job, on_tmpfs, run_to_end, script, torchrun
from tests.levels import SHORT, run_level

LEVELS = ladder.with_checkpoints()
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
@pytest.mark.parametrize(
    "level", [pytest.param(ladder.FULL, marks=pytest.mark.long), pytest.param("04_trainer", marks=pytest.mark.long)]
)
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


def drop_the_progress(folder: Path) -> str:
    name = next(name for name in ("trainer_state.json", "custom_checkpoint_0.pkl") if (folder / name).exists())
    (folder / name).unlink()
    return name


DAMAGES = [cut_short, flip_a_bit, put_a_foreign_one, drop_the_progress]


SOME = [DAMAGES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DAMAGES[1:])]


@pytest.mark.parametrize("damage", SOME)
@pytest.mark.parametrize("level", [LEVELS[0], *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:])])
def test_a_damaged_checkpoint_is_named_and_passed_over_for_the_one_before(level, damage, tmp_path, caplog, capsys):
    training = [*SHORT, "--epochs", "2"]  # four steps
    _, expected = run_level(level, training)
    run_level(level, [*training, *saving(tmp_path), "--max-steps", "3"])
    damaged = complete(tmp_path)[-1]
    name = damage(damaged)
    _, weights = run_level(level, [*training, *saving(tmp_path)])
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "skipping a checkpoint: " in said and f"{damaged}/{name}" in said.replace(" holds no ", "/")
    assert re.search("[Rr]esumed at step (= )?2\n", capsys.readouterr().out)
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert complete(tmp_path)[-2] == damaged  # the run came to its number again
    for each in complete(tmp_path):
        checkpointing.finish_and_verify(each)


@pytest.mark.parametrize("damage", SOME)
@pytest.mark.parametrize("level", LEVELS)
def test_where_all_checkpoints_are_damaged_nothing_is_begun_anew_and_nothing_touched(level, damage, tmp_path):
    run_level(level, [*SHORT, *saving(tmp_path)])
    for each in complete(tmp_path):
        damage(each)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=f"there is no complete checkpoint in {tmp_path}"):
        run_level(level, [*SHORT, *saving(tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before


WAYS = {"plain": plain, "torchrun": lambda level, *argv: torchrun(script(level), *argv)}


def errors(said: str) -> list[str]:
    """The lines of errors that the user is to read. No rank may add a traceback of its own to them."""
    assert not re.search(r"^(\[rank\d\]: )?Traceback", said.partition("torch/distributed/elastic")[0], re.MULTILINE), (
        said
    )
    return [line for line in said.splitlines() if line.startswith("error: ")]


# Each level once in each way would be twice the launches, and prove nothing more.
WAY_OF_LEVEL = [
    pytest.param(ladder.FULL, "torchrun", marks=pytest.mark.long),
    pytest.param("04_trainer", "plain", marks=pytest.mark.slow),
]


@ON_LINUX
@pytest.mark.parametrize("level, way", WAY_OF_LEVEL)
def test_that_no_checkpoint_is_whole_is_one_line(level, way, tmp_path):
    run_level(level, [*SHORT, *saving(tmp_path)])
    for each in complete(tmp_path):
        cut_short(each)
    done = run_to_end(WAYS[way](level, *SHORT, *saving(tmp_path)))
    place = tmp_path / "checkpoints" if level == ladder.FULL else tmp_path
    assert errors(done.stderr) == [f"error: there is no complete checkpoint in {place}"]
    assert done.stderr.count("skipping a checkpoint: ") == 2
    if way == "plain":
        assert done.returncode == 2 and done.stderr.count("\n") == 3
    assert done.returncode != 0


@MOUNTED
@pytest.mark.parametrize("level, way", WAY_OF_LEVEL)
def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_from_the_old_checkpoint(level, way, tmp_path):
    """40 MB take two checkpoints of 14 MB, which a third one must not replace before it is whole."""
    argv = [level, *SMALL, "--epochs", "5"]
    fails, goes_on = WAYS[way](*argv, *saving(tmp_path)), WAYS[way](*argv, *saving(tmp_path, every=999))
    makes_room = ["rm", "-rf", *(f"{tmp_path}/{name}" for name in ("checkpoints/checkpoint_1", "checkpoint-1"))]
    done = run_to_end(on_tmpfs(tmp_path, "size=40m", fails, makes_room, goes_on))
    codes = re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE)
    assert codes == ["2" if way == "plain" else "1", "0", "0"], done.stdout + done.stderr
    (said,) = errors(done.stderr)
    assert re.fullmatch(rf"error: \[Errno 28\] No space left on device: '{tmp_path}/\S+'", said)
    assert re.search("[Rr]esumed at step (= )?2\n", done.stdout)


@MOUNTED
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--save", "--json"])
def test_a_full_disk_at_the_end_is_one_line_after_the_result(flag, tmp_path):
    path = tmp_path / "end"
    full = ["sh", "-c", f"head -c 1M /dev/zero > {tmp_path}/rest; true"]
    done = run_to_end(
        on_tmpfs(tmp_path, "size=1m", full, plain("00_single_gpu", *SMALL, flag, str(path)), ["ls", str(path)])
    )
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["0", "2", "2"], done.stdout + done.stderr
    assert "00_single_gpu: synthetic accuracy" in done.stdout
    assert errors(done.stderr) == [f"error: {path} cannot be written: [Errno 28] No space left on device"]


def words_for(folder: str, action: str) -> str:
    """The last words of a process that `action` ends with an uncaught error: one line, or the error's type."""
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Thing(action))
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch("common.errors.time"),
        contextlib.suppress(UserError),
    ):
        try:
            with file_errors_in_one_line(Path(folder)):
                if action == "elsewhere":
                    Path("nowhere", "at all").read_text()
                elif action != "leave" or accelerator.process_index == 1:
                    accelerator.save_state(f"{folder}/file/c" if action == "save" else f"{folder}/c")
        except Exception as error:
            print(type(error).__name__, file=sys.stderr)
        finally:
            accelerator.end_training()
    return said.getvalue()


@dataclass
class Thing:
    action: str

    def state_dict(self) -> dict:
        is_mistaken = self.action == "mistake" and PartialState().is_main_process
        return {"number": 1 + "1"} if is_mistaken else {}

    def load_state_dict(self, state: dict) -> None: ...


def test_only_what_is_wrong_with_the_files_is_said_in_one_line(tmp_path):
    """Mistakes in the program keep their tracebacks, also where they are met while a checkpoint is saved."""
    (tmp_path / "file").touch()
    place = f"[Errno 20] Not a directory: '{tmp_path}/file/c"
    first, second = ranks(2).run(words_for, str(tmp_path), "save")
    assert first.startswith(f"error: {place}") and first.count("\n") == 1
    assert second == first.replace("error: ", "error: rank 0: NotADirectoryError: ")
    first, second = ranks(2).run(words_for, str(tmp_path), "mistake")
    assert (first, second) == ("TypeError\n", "RemoteError\n")
    assert ranks(2).run(words_for, str(tmp_path), "elsewhere") == ["FileNotFoundError\n"] * 2
    first, second = ranks(2).run(words_for, str(tmp_path), "leave")
    assert first == "" and re.fullmatch(r"\w*Error\n", second)  # gloo's: its peer has left


@MOUNTED
@pytest.mark.slow
def test_a_read_only_checkpoint_folder_is_one_line_before_the_training(tmp_path):
    ways = (torchrun(script(ladder.FULL), *SMALL, *saving(tmp_path)), plain("04_trainer", *SMALL, *saving(tmp_path)))
    done = run_to_end(on_tmpfs(tmp_path, "ro", *ways))
    assert re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE) == ["1", "2"]
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    wanted = f"error: --checkpoint-dir cannot be written to: [Errno 30] Read-only file system: '{tmp_path}/.lock'"
    assert said == [wanted] * 2


@ON_LINUX
@pytest.mark.slow
def test_a_second_job_on_the_folder_of_a_first_is_refused_and_does_not_disturb_it(tmp_path):
    command = torchrun(script(ladder.FULL), *SMALL, "--epochs", "5000", *saving(tmp_path))
    with job(command) as first:
        first.wait_for(lambda: complete(tmp_path))
        second = run_to_end(plain(ladder.FULL, *SMALL, "--epochs", "5000", *saving(tmp_path)))
        seen = newest(tmp_path)
        first.wait_for(lambda: newest(tmp_path) > seen + 2)
        first.process.terminate()
        assert first.end() != 0 and "stopped at step" in first.out, first.err
    for each in complete(tmp_path):
        checkpointing.finish_and_verify(each)
    assert second.returncode == 2 and "resumed" not in second.stdout
    said = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: another job is saving to {tmp_path}: wait for it, or name another --checkpoint-dir"]
