"""The start of a script on several processes, as torchrun starts it, and its end: by itself, or because it hangs.

A rank makes progress when one of its observers is called: when it reads a batch, calls a network, makes a step, saves
or calls a collective. Its heartbeat shows that in a file. The script hangs when no rank makes progress for some time.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from common.doctor.record import FILE, PROGRESS, End, Record, read
from common.processes import free_port

POLL = 0.2  # seconds
AFTER_A_CRASH = 5.0  # seconds that the other ranks have
START = 120.0  # seconds until all ranks run the script: on a busy machine imports alone may take half a minute
LOG = "log"


def observe(command: list[str], processes: int, folder: Path, patience: float) -> list[Record]:
    """Run a command on several processes until it ends, or no rank has made progress for `patience` seconds.

    The command runs `run_script.py`. Each rank has a folder in `folder`, for what it prints and for its record.
    """
    port = free_port()
    folders = [folder / f"rank{rank}" for rank in range(processes)]
    started: list[subprocess.Popen] = []
    try:
        for rank, rank_folder in enumerate(folders):
            rank_folder.mkdir()
            with (rank_folder / LOG).open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-u", *command],
                    env=_environment(rank, processes, port),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the doctor, which then ends all ranks
                )
            started.append(process)
        _wait(started, folders, patience)
    finally:
        stopped = _stop(started)
    records = []
    for rank, process in enumerate(started):
        record = _record(rank, folders[rank])
        record.end = _end_of(record, process.returncode, was_stopped=rank in stopped)
        records.append(record)
    return records


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": "1",  # torchrun's default
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if torch.cuda.device_count() < processes:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl wants a GPU for each
    return environment


def _wait(started: list[subprocess.Popen], folders: list[Path], patience: float) -> None:
    """Wait until all ranks have ended, or none has made progress for `patience` seconds.

    What an ended rank has started is ended at once: later another group of processes may have its number.
    """
    running = list(started)
    progress = [""] * len(folders)
    last_progress = time.monotonic()
    while running:
        for process in list(running):
            if process.poll() is not None:
                running.remove(process)
                _signal_group(process, signal.SIGKILL)
        for rank, rank_folder in enumerate(folders):
            file = rank_folder / PROGRESS
            text = file.read_text() if file.exists() else ""
            if text not in ("", progress[rank]):  # it is empty while it is written
                progress[rank] = text
                last_progress = time.monotonic()
        idle = time.monotonic() - last_progress
        if any(process.returncode for process in started):  # after a crash the others may wait for that rank in vain
            limit = AFTER_A_CRASH
        elif all(progress):
            limit = patience
        else:  # a rank has not begun to run the script
            limit = max(patience, START)
        if idle > limit:
            return
        time.sleep(POLL)


def _stop(started: list[subprocess.Popen]) -> list[int]:
    """End all ranks, and return those that had not ended by themselves."""
    # A rank may have ended since the last poll: its group is still to be killed, but we have not stopped it.
    not_yet_killed = [process for process in started if process.returncode is None]
    running = [rank for rank, process in enumerate(started) if process.poll() is None]
    # All are stopped before one is killed: a rank whose connections close would leave the line where it waits.
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        for process in not_yet_killed:
            _signal_group(process, signal_number)
    for process in started:  # after all are killed: a second Ctrl-C may interrupt this
        process.wait()
    return running


def _signal_group(process: subprocess.Popen, signal_number: int) -> None:
    """Signal a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)


def _end_of(record: Record, exit_code: int, was_stopped: bool) -> End:
    """The end that a rank has noted, and what it could not note itself."""
    end = record.end
    if was_stopped:
        end = replace(end, reason="stopped")
    elif exit_code != 0 and end.reason is None:  # it was killed, or left by os._exit
        error = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        end = replace(end, reason="crash", error=error)
    if end.reason == "crash" and not end.message:
        end = replace(end, message=f"last printed: {record.last_printed}")
    return end


def _record(rank: int, folder: Path) -> Record:
    """The record that a rank has left, or an empty one, with the last line that it has printed."""
    record = Record(rank)
    if (folder / FILE).exists():
        record = read(folder / FILE)
    printed = (folder / LOG).read_text(errors="replace")
    record.last_printed = printed.strip().split("\n")[-1]
    return record
