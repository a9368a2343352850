"""Told to stop by a signal, a run saves a checkpoint at a step that all ranks agree on; continued, it ends the same."""

import glob
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common.run import checkpointing
from common.run.checkpointing import PATIENCE, Checkpointing, Preemption

from common import ladder
from common.args import CheckpointInterval, parse_args
from common.process_group import process_group
from common.processes import ranks
from tests.levels import farthest, run_level, run_on_ranks

SETTINGS = ["--dataset", "synthetic", "--train-samples", "320", "--eval-samples", "100", "--batch-size", "16"]
SETTINGS += ["--epochs", "1000", "--checkpoint-every", "5"]


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
    (step,) = re.findall(r"^stopped at step (\d+) by SIG\w+: run it again to continue$", said, re.MULTILINE)
    steps = int(step) + 7
    more = ["--max-steps", str(steps), "--checkpoint-dir", str(folder)]
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
    [(ladder.FULL, signal.SIGTERM), ("04_trainer", signal.SIGINT)],
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
    pytest.param("04_trainer", "one rank", marks=pytest.mark.long),
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


@pytest.mark.long
def test_a_rank_that_waits_for_a_dead_one_does_not_wait_for_ever_when_it_is_told_to_stop(tmp_path):
    job = in_the_middle(ladder.FULL, tmp_path / "stopped", processes=2)
    started = ranks_of(job.pid)
    os.kill(started[0], signal.SIGSTOP)  # neither dead nor alive: its peer waits in a collective
    try:
        time.sleep(1)
        os.kill(started[1], signal.SIGTERM)
        begun = time.monotonic()
        while Path(f"/proc/{started[1]}").exists() and time.monotonic() < begun + 100:
            time.sleep(0.1)
        assert not Path(f"/proc/{started[1]}").exists()
        assert time.monotonic() - begun > PATIENCE / 2
    finally:
        os.kill(started[0], signal.SIGCONT)
        code, said = finish(job)
    assert code != 0 and "stopped at step" not in said


@pytest.mark.slow
def test_without_checkpoints_a_signal_ends_the_run_as_ever():
    job = start(ladder.FULL)
    assert job.stdout.readline()  # the plan: it is about to train
    job.terminate()
    code, said = finish(job, 60)
    assert code == -signal.SIGTERM and "stopped at" not in said


def test_an_error_is_shown_while_a_fork_of_the_block_is_still_alive():
    """An error that comes out of a loader keeps its workers alive, which are forks."""
    sleeping = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    started = time.monotonic()
    with pytest.raises(OSError, match="the disk has gone"), Preemption().listening():
        sleeping.start()
        raise OSError("the disk has gone")
    assert time.monotonic() - started < 20
    sleeping.kill()
    sleeping.join()


def steps_of_checkpoints(answers_come_late: bool) -> list[int]:
    """Of 120 steps, 20 in a second, with a checkpoint every two seconds."""
    with process_group(), pytest.MonkeyPatch.context() as patch:
        checkpoints = Checkpointing(Path("unused"), CheckpointInterval(seconds=2), torch.device("cpu"))
        now = [0.0]
        patch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: now[0]))
        checkpoints._interval_began = 0.0
        if answers_come_late:  # as on a GPU, where nobody waits for them; here the tensor stays on the CPU
            zeros = torch.zeros
            patch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
            checkpoints._device = torch.device("cuda")
        due = []
        for step in range(1, 121):
            now[0] += 0.05
            checkpoints.ask_all_ranks(step)
            if checkpoints.is_due(step, total_steps=1000):
                due.append(step)
        return due


@pytest.mark.parametrize("answers_come_late, expected", [(False, [40, 90]), (True, [50, 110])])
def test_time_that_is_up_leads_to_one_checkpoint(answers_come_late, expected):
    """Not to another one at the next exchange, where the answer comes late."""
    assert ranks(2).run(steps_of_checkpoints, answers_come_late) == [expected, expected]


def test_signals_mean_what_they_meant_before_when_a_run_is_over(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for level in ladder.with_checkpoints():
        flags = [*SETTINGS, "--max-steps", "2", "--checkpoint-dir", str(tmp_path / level)]
        module = ladder.load(level)
        module.train(parse_args(module.__file__, flags))
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
