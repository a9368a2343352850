"""Jobs for tests: commands as in a user's terminal, which are watched, disturbed, and cleaned up in any case.

The ways in which tests run ranks:

    ranks(2).run(job, 5)             job(5) on two processes, which are reused       common/processes.py
    on_ranks(2, job, 5)              the same with an Accelerator: job(accelerator, 5)
                                                                     tests/unit/accelerator/several_processes.py
    run_on_ranks(level, 2, argv)     a level's training on them                       tests/levels.py
    run_to_end(torchrun(path))       a command that starts its own, until its end     here
    with job(torchrun(path)) as run  the same, to be disturbed                        here
"""

import contextlib
import glob
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common import ladder
from common.accelerator.commands.launch import RANKS

# Seconds. The machine may be slow, and only a hang takes this long.
PATIENCE = 240

# Processes are found and told apart by their environment, which Linux shows.
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")

_MARK = "LADDER_TEST_JOB"


class Job:
    """Commands, each the agent of a node if there are several, and all the processes that come of them.

    Attributes:
        processes: the process of each command, by the number of its node.
        folder: has files with what each command and its processes write to stdout and to stderr.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.processes: dict[int, subprocess.Popen] = {}
        self._mark = uuid.uuid4().hex
        self._environment = {name: value for name, value in os.environ.items() if name not in RANKS}
        self._environment |= {"PYTHONPATH": str(ladder.ROOT), **environment, _MARK: self._mark}

    def start(self, node: int, command: list[str]) -> None:
        """Start the command of a node, which may have been lost before."""
        with (self.folder / f"out.{node}").open("ab") as out, (self.folder / f"err.{node}").open("ab") as err:
            self.processes[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ladder.ROOT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return "".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("out.*")))

    @property
    def err(self) -> str:
        return "".join(map(self.err_of, self.processes))

    def err_of(self, node: int) -> str:
        return (self.folder / f"err.{node}").read_text(errors="replace")

    def environments(self) -> dict[int, dict[str, str]]:
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # It has ended meanwhile, or is another user's.
                content = path.read_bytes()
                if f"{_MARK}={self._mark}".encode() in content:
                    words = (word.partition(b"=") for word in content.split(b"\0"))
                    found[int(path.parent.name)] = {os.fsdecode(name): os.fsdecode(value) for name, _, value in words}
        return found

    def rank(self, number: int) -> int:
        """The pid of rank `number`; its helpers, such as loader workers, have the same environment and later pids."""
        return min(pid for pid, environment in self.environments().items() if environment.get("RANK") == str(number))

    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes.values())

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Return when `condition()` is true; an AssertionError shows the output if the job ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            # The condition may have come true just before the end, so it is asked once more.
            ended = self.has_ended() and not condition()
            assert not ended, f"the job has ended\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"nothing for {seconds} s\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def end(self, seconds: float = PATIENCE) -> list[int]:
        """Wait until the commands have ended and no process of them is left; returns their exit codes."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() or self.environments():
            assert time.monotonic() < deadline, f"left over: {self.environments().keys()}\n{self.out}\n{self.err}"
            time.sleep(0.02)
        return [process.returncode for process in self.processes.values()]

    def kill(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while alive := self.environments():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"cannot be killed: {alive.keys()}"
            time.sleep(0.02)
        for process in self.processes.values():
            process.kill()  # Needed where there is no /proc.
            process.wait()


@contextlib.contextmanager
def job(*commands: list[str], **environment: str) -> Iterator[Job]:
    """Start the commands; kill what is left of them at the end."""
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        started = Job(Path(folder), environment)
        try:
            for node, command in enumerate(commands):
                started.start(node, command)
            yield started
        finally:
            started.kill()


def torchrun(
    *argv: str, processes: int = 2, restarts: int = 0, rendezvous: Sequence[str] = ("--standalone",)
) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes)]
    return [*command, "--max-restarts", str(restarts), *argv]


def launcher(*argv: str, processes: int = 2, restarts: int = 0) -> list[str]:
    command = [sys.executable, "-m", "common.accelerator", "launch", "--cpu"]
    return [*command, "--num_processes", str(processes), "--max_restarts", str(restarts), *argv]


def script(level: str) -> str:
    return str(ladder.script(level))


def level_command(level: str, *argv: str, processes: int | None = None) -> list[str]:
    """The level's script under torchrun, or as one process without it."""
    if processes is None:
        return [sys.executable, script(level), *argv]
    return torchrun(script(level), *argv, processes=processes)


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints under `folder` by their numbers, whichever level wrote them.

    `glob`, unlike a Path's, takes no harm from a folder that is renamed meanwhile.
    """
    found = {}
    for manifest in glob.glob(f"{folder}/**/manifest.json", recursive=True):
        checkpoint = Path(manifest).parent
        name = re.fullmatch(r"checkpoint[-_](\d+)", checkpoint.name)
        if name:  # Others are being written, or have been put aside.
            found[int(name[1])] = checkpoint
    return found


def newest_checkpoint(folder: Path) -> int:
    """The number of the newest complete checkpoint; -1 without any."""
    return max(complete_checkpoints(folder), default=-1)


def run_to_end(command: list[str], seconds: float = PATIENCE, **environment: str) -> subprocess.CompletedProcess:
    """`command`, when it has ended and no process of it is left."""
    with job(command, **environment) as started:
        (code,) = started.end(seconds)
        return subprocess.CompletedProcess(command, code, started.out, started.err)


def run_all_to_end(commands: dict[Hashable, list[str]]) -> dict[Hashable, subprocess.CompletedProcess]:
    """`run_to_end` of each command, four at a time: what waits for a time-out leaves the cores to the others."""
    with ThreadPoolExecutor(4) as pool:
        endings = {key: pool.submit(run_to_end, command) for key, command in commands.items()}
        return {key: ending.result() for key, ending in endings.items()}


def resumed_at(output: str) -> list[int]:
    """The steps at which runs say that they go on, such as "03_accelerate/train_full: resumed at step 20"."""
    return [int(step) for step in re.findall(r"resumed at step (\d+)", output)]
