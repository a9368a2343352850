"""The run of a script on several processes, as torchrun starts it, until all end or the script hangs.

A rank makes progress when one of its observers is called: when it reads a batch, calls a network, makes a step, saves
or calls a collective. Then its heartbeat touches a file. The script hangs when no rank makes progress for some time.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from common.doctor.checks.end import end_of
from common.doctor.record import FILE, PROGRESS, Record, read
from common.launch import free_port, rank_variables

POLL_SECONDS = 0.2
SECONDS_AFTER_A_CRASH = 5.0  # the other ranks have these to end by themselves
SECONDS_TO_START = 120.0  # the imports before the script may take half a minute on a busy machine
LOG = "log"


class Rank(NamedTuple):
    number: int
    folder: Path  # for what it prints, and for its record
    process: subprocess.Popen


def run_ranks(command: list[str], processes: int, folder: Path, time_out: float) -> list[Record]:
    """Run a command on several processes until it ends, or no rank has made progress for `time_out` seconds."""
    environment = _environment(processes)
    port = free_port()
    ranks: list[Rank] = []
    try:
        for number in range(processes):
            variables = {**environment, **rank_variables(number, processes, port)}
            ranks.append(_start(number, folder / f"rank{number}", command, variables))
        why_stopped = _wait(ranks, time_out)
    finally:
        stopped = _stop(ranks)
    return [_record(rank, why_stopped if rank in stopped else "") for rank in ranks]


def _start(number: int, folder: Path, command: list[str], environment: dict[str, str]) -> Rank:
    folder.mkdir()
    with (folder / LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the doctor, which then ends all ranks
        )
    return Rank(number, folder, process)


def _environment(processes: int) -> dict[str, str]:
    """The environment variables that all ranks have. They see no GPU if there is not one for each, as nccl wants it."""
    environment = {**os.environ, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "doctor"}  # so a script knows torchrun
    environment.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default
    gpus = torch.cuda.device_count()
    if gpus < processes:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if gpus:
            print(f"too few GPUs ({gpus}) for {processes} processes: the script sees none", file=sys.stderr)
    return environment


def _wait(ranks: list[Rank], time_out: float) -> str:
    """Wait until all ranks have ended. Returns a text if the others must be stopped, as none makes progress."""
    running = list(ranks)
    state = None
    changed = time.monotonic()
    while running:
        for rank in list(running):
            if rank.process.poll() is not None:
                running.remove(rank)
                # What it has started ends now: later another group of processes may have its number.
                _signal_group(rank, signal.SIGKILL)
        has_crashed = any(rank.process.returncode for rank in ranks)
        newest = (has_crashed, [_last_progress(rank) for rank in ranks])
        if newest != state:
            state = newest
            changed = time.monotonic()
        limit = time_out
        if has_crashed:  # the others may wait for that rank in vain
            limit = SECONDS_AFTER_A_CRASH
        elif any(_last_progress(rank) is None for rank in running):
            limit = max(time_out, SECONDS_TO_START)
        if time.monotonic() - changed > limit:
            return f"no rank made progress for {limit:g} s"
        time.sleep(POLL_SECONDS)
    return ""


def _last_progress(rank: Rank) -> int | None:
    file = rank.folder / PROGRESS
    return file.stat().st_mtime_ns if file.exists() else None


def _stop(ranks: list[Rank]) -> list[Rank]:
    """Kill the ranks that `_wait` has not seen end. Returns those which did not end by themselves."""
    running = [rank for rank in ranks if rank.process.returncode is None]
    # All are stopped before one is killed: a rank whose connections close would leave the line where it waits.
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in running:
            _signal_group(rank, signal_number)
    for rank in ranks:  # after all are killed: a second Ctrl-C may interrupt this
        rank.process.wait()
    return [rank for rank in running if rank.process.returncode == -signal.SIGKILL]


def _signal_group(rank: Rank, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.process.pid, signal_number)


def _record(rank: Rank, why_stopped: str) -> Record:
    """The record that a rank has left, or an empty one, and what it could not note itself."""
    file = rank.folder / FILE
    record = read(file) if file.exists() else Record(rank.number)
    printed = (rank.folder / LOG).read_text(errors="replace").strip().splitlines()
    record.last_printed = "".join(printed[-1:])
    record.end = end_of(record.end, rank.process.returncode, why_stopped, printed)
    return record
