"""The start of a script on several processes, as torchrun starts it, and its end: by itself, or where it hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common.doctor.record import Record, read
from common.doctor.watcher import STOP, STOPPED
from common.processes import free_port

POLL = 0.2  # seconds
AFTER_A_CRASH = 5.0  # seconds that the other ranks have
TO_WRITE = 10.0  # seconds for the last records


def observe(
    script: Path, arguments: list[str], processes: int, folder: Path, last_step: int | None, patience: float
) -> list[Record]:
    """Run a script on `processes` processes until it ends, or no rank has got on for `patience` seconds."""
    port = free_port()
    started: list[subprocess.Popen] = []
    try:
        for rank in range(processes):
            started.append(_start(rank, script, arguments, processes, port, folder, last_step))
        _wait(started, folder, patience)
        _let_all_write(started, folder)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
        for process in started:  # after all are killed: a second Ctrl-C may interrupt this
            process.wait()
    return [_record(rank, process.returncode, folder) for rank, process in enumerate(started)]


def _start(
    rank: int, script: Path, arguments: list[str], processes: int, port: int, folder: Path, last_step: int | None
) -> subprocess.Popen:
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
    watched = str(Path(__file__).with_name("watched.py"))
    command = [sys.executable, "-u", watched, str(folder), str(last_step or 0), str(script), *arguments]
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the doctor, which then ends all ranks
        )


def _wait(started: list[subprocess.Popen], folder: Path, patience: float) -> None:
    """Wait until all ranks have ended, or none has got on for `patience` seconds."""
    progress: dict[int, str] = {}
    moved = time.monotonic()
    with tqdm(desc="optimizer steps", leave=False, disable=None) as bar:
        while any(process.poll() is None for process in started):
            for rank in range(len(started)):
                path = folder / f"rank{rank}.progress"
                text = path.read_text() if path.exists() else ""
                if text and text != progress.get(rank):  # it is empty while it is written
                    progress[rank] = text
                    moved = time.monotonic()
                    bar.n = int(text.split()[-1])
                    bar.refresh()
            idle = time.monotonic() - moved
            crashed = any(process.poll() for process in started)
            if idle > patience or (crashed and idle > AFTER_A_CRASH):  # the others may wait for it in vain
                return
            time.sleep(POLL)


def _let_all_write(started: list[subprocess.Popen], folder: Path) -> None:
    """Let every rank that still runs write its last record. Only then may the first be killed."""
    (folder / STOP).touch()
    deadline = time.monotonic() + TO_WRITE
    for rank, process in enumerate(started):
        stopped = folder / STOPPED.format(rank)
        while process.poll() is None and not stopped.exists() and time.monotonic() < deadline:
            time.sleep(POLL)


def _record(rank: int, code: int, folder: Path) -> Record:
    """The record of a rank, with what was seen of it from here; nothing else where it left none."""
    path = folder / f"rank{rank}.pickle"
    record = read(path) if path.exists() else Record(rank)
    printed = (folder / f"rank{rank}.log").read_text(errors="replace")
    record.last_line = printed.strip().split("\n")[-1]
    record.code = code
    return record
