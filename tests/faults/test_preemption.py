"""Told to stop by a signal, a run saves a checkpoint at a step that all ranks agree on; continued, it ends the same."""

import glob
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import ladder
from tests.levels import farthest, run_level, run_on_ranks

SETTINGS = ["--dataset", "synthetic", "--train-samples", "320", "--eval-samples", "100", "--batch-size", "16"]
SETTINGS += ["--epochs", "1000", "--checkpoint-every", "5"]  # 20 steps each
TRAINER = "04_trainer/train_full"


def start(level: str, *flags, processes: int | None = None) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    return subprocess.Popen(
        [sys.executable, *launcher, str(ladder.script(level)), *SETTINGS, *map(str, flags)],
        cwd=ladder.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As many as in this process: other sums would have other last bits.
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
    )


def finish(job: subprocess.Popen, timeout: float = 120) -> tuple[int, str]:
    """Its exit code and all it said; nothing is left of it, whatever happens."""
    try:
        out, err = job.communicate(timeout=timeout)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return job.returncode, out + err


def in_the_middle(level: str, folder: Path, processes: int | None = None) -> subprocess.Popen:
    """A run that would go on for long, after its first periodic checkpoint."""
    job = start(level, "--checkpoint-dir", folder, processes=processes)
    deadline = time.monotonic() + 120
    while not glob.glob(f"{folder}/**/manifest.json", recursive=True):  # not in a draft, whose name is hidden
        assert job.poll() is None and time.monotonic() < deadline, finish(job, 10)
        time.sleep(0.01)
    return job


def assert_it_stopped_and_continues(level: str, folder: Path, said: str, processes: int | None = None) -> None:
    """Continued for some steps it has the weights of a run of as many steps that nobody stopped, bit for bit."""
    (step,) = re.findall(r"^stopped at step (\d+): run it again to continue$", said, re.MULTILINE)
    epochs = int(step) // 20 + 2
    steps = 20 * epochs
    more = ["--epochs", str(epochs), "--checkpoint-dir", str(folder)]
    undisturbed = [*SETTINGS, *more[:-1], str(folder.with_name("undisturbed"))]
    if processes:
        path = folder.with_suffix(".pt")
        code, said = finish(start(level, *more, "--save", path, processes=processes))
        assert code == 0 and f"| {steps} steps in" in said, said
        continued = torch.load(path, weights_only=True)
        _, expected = run_on_ranks(level, processes, undisturbed)
    else:
        result, continued = run_level(level, [*SETTINGS, *more])
        assert result["steps"] == steps
        _, expected = run_level(level, undisturbed)
    assert farthest(continued, expected) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "number"),
    [(ladder.FULL, signal.SIGTERM), (TRAINER, signal.SIGINT)],
)
def test_a_process_that_is_told_to_stop_saves_and_continued_it_ends_with_the_same_bits(level, number, tmp_path):
    job = in_the_middle(level, tmp_path / "stopped")
    job.send_signal(number)
    code, said = finish(job)
    assert code == 128 + number, said
    assert "Traceback" not in said
    assert_it_stopped_and_continues(level, tmp_path / "stopped", said)


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun has started."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


SIGNALLED = [
    pytest.param(ladder.FULL, "the whole group", marks=pytest.mark.slow),
    pytest.param(ladder.FULL, "torchrun", marks=pytest.mark.long),
    pytest.param(TRAINER, "one rank", marks=pytest.mark.long),
]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks of a launcher in /proc")
@pytest.mark.parametrize("level, told", SIGNALLED)
def test_ranks_agree_on_the_step_whoever_is_told(level, told, tmp_path):
    job = in_the_middle(level, tmp_path / "stopped", processes=2)
    started = ranks_of(job.pid)
    assert len(started) == 2
    if told == "torchrun":
        job.terminate()
    elif told == "one rank":
        os.kill(started[1], signal.SIGTERM)
    else:  # as Ctrl-C in a terminal does
        os.killpg(job.pid, signal.SIGINT)
    code, said = finish(job)
    assert code != 0
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert_it_stopped_and_continues(level, tmp_path / "stopped", said, processes=2)


@pytest.mark.slow
def test_without_checkpoints_a_signal_ends_the_run_as_ever():
    job = start(ladder.FULL)
    assert job.stdout.readline()  # the plan: it is about to train
    job.terminate()
    code, said = finish(job, 60)
    assert code == -signal.SIGTERM and "stopped at" not in said
