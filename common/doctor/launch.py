"""The start of a script on several processes, as torchrun starts it, and its end: by itself, or where it hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from common.doctor.folder import Files
from common.doctor.record import Record, read
from common.processes import free_port

POLL = 0.2  # seconds
AFTER_A_CRASH = 5.0  # seconds that the other ranks have
TO_WRITE = 10.0  # seconds for the last records


class Patient(NamedTuple):
    """A script, and how it is to be run.

    Attributes:
        last_step: the optimizer step after which it is ended; None: its own end.
        patience: seconds in which a rank must get on.
    """

    script: Path
    arguments: list[str]
    processes: int
    last_step: int | None
    patience: float


def observe(patient: Patient, folder: Path) -> list[Record]:
    """Run a script on several processes until it ends, or no rank has got on for some time."""
    port = free_port()
    files = [Files(folder, rank) for rank in range(patient.processes)]
    started: list[subprocess.Popen] = []
    try:
        for rank in range(patient.processes):
            started.append(_start(patient, rank, port, folder))
        _wait(started, files, patient.patience)
        _let_all_write(started, files)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
        for process in started:  # after all are killed: a second Ctrl-C may interrupt this
            process.wait()
    records = []
    for rank, process in enumerate(started):
        records.append(_record(rank, files[rank], process.returncode))
    return records


def _start(patient: Patient, rank: int, port: int, folder: Path) -> subprocess.Popen:
    environment = {
        "OMP_NUM_THREADS": "1",  # torchrun's default
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(patient.processes),
        "LOCAL_WORLD_SIZE": str(patient.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if torch.cuda.device_count() < patient.processes:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl wants a GPU for each
    run_script = str(Path(__file__).with_name("run_script.py"))
    last_step = str(patient.last_step or 0)
    command = [sys.executable, "-u", run_script, str(folder), last_step, str(patient.script), *patient.arguments]
    with Files(folder, rank).log.open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the doctor, which then ends all ranks
        )


def _wait(started: list[subprocess.Popen], files: list[Files], patience: float) -> None:
    """Wait until all ranks have ended, or none has got on for `patience` seconds."""
    progress = [""] * len(files)
    got_on = time.monotonic()
    with tqdm(desc="optimizer steps", leave=False, disable=None) as bar:
        while any(process.poll() is None for process in started):
            for rank, of_rank in enumerate(files):
                text = of_rank.progress.read_text() if of_rank.progress.exists() else ""
                if text not in ("", progress[rank]):  # it is empty while it is written
                    progress[rank] = text
                    got_on = time.monotonic()
                    bar.n = int(text.split()[-1])
                    bar.refresh()
            idle = time.monotonic() - got_on
            crashed = any(process.poll() for process in started)
            if idle > patience or (crashed and idle > AFTER_A_CRASH):  # the others may wait for it in vain
                return
            time.sleep(POLL)


def _let_all_write(started: list[subprocess.Popen], files: list[Files]) -> None:
    """Let every rank that still runs write its last record. Only then may the first be killed."""
    files[0].stop.touch()
    deadline = time.monotonic() + TO_WRITE
    for process, of_rank in zip(started, files, strict=True):
        while process.poll() is None and not of_rank.stopped.exists():
            if time.monotonic() > deadline:
                return
            time.sleep(POLL)


def _record(rank: int, files: Files, exit_code: int) -> Record:
    """The record of a rank, with what was seen of it from here; nothing else where it left none."""
    record = Record(rank)
    if files.record.exists():
        record = read(files.record)
    printed = files.log.read_text(errors="replace")
    record.last_line = printed.strip().split("\n")[-1]
    record.exit_code = exit_code
    return record
