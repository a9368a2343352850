"""Jobs for tests: what a user starts in a terminal, here to be watched, wounded, and cleaned up whatever happens."""

import contextlib
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common import ladder

# Minutes, where seconds should do: the machine may be slow, and only a hang takes this long.
PATIENCE = 180

# Processes are found and told apart by their environment, which Linux shows.
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")

SABOTEUR = str(Path(__file__).parent / "saboteur.py")
_MARK = "LADDER_TEST_JOB"
# Of the pytest that starts the job: a job must not take itself for part of another one.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Job:
    """A command and all the processes that come of it."""

    process: subprocess.Popen
    mark: str
    folder: Path
    final_output: dict[str, str] = field(default_factory=dict)  # once it has ended

    @property
    def out(self) -> str:
        return self._output("out")

    @property
    def err(self) -> str:
        return self._output("err")

    def _output(self, stream: str) -> str:
        if self.final_output:
            return self.final_output[stream]
        return (self.folder / stream).read_text(errors="replace")

    def environments(self) -> dict[int, dict[str, str]]:
        """The environment of each living process of the job, by its pid."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                content = path.read_bytes()
                if f"{_MARK}={self.mark}".encode() in content:
                    words = (word.partition(b"=") for word in content.split(b"\0"))
                    found[int(path.parent.name)] = {name.decode(): value.decode() for name, _, value in words}
        return found

    def rank(self, number: int) -> int:
        """The pid of rank `number`; its helpers, such as loader workers, have the same environment and later pids."""
        return min(pid for pid, environment in self.environments().items() if environment.get("RANK") == str(number))

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Return when `condition()` is true; an AssertionError shows what the job said if it ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll() is not None and not condition()
            assert not ended, f"the job ended with {self.process.returncode}\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"nothing for {seconds} s\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait until the command has ended and no process of it is left; returns its exit code."""
        deadline = time.monotonic() + seconds
        try:
            self.process.wait(seconds)
            while self.environments():
                assert time.monotonic() < deadline, f"left over: {self.environments().keys()}"
                time.sleep(0.02)
        except (subprocess.TimeoutExpired, AssertionError) as failure:
            raise AssertionError(f"{failure}\n{self.out}\n{self.err}") from None
        return self.process.returncode

    def kill(self) -> None:
        """Leave none of its processes alive."""
        deadline = time.monotonic() + PATIENCE
        while alive := self.environments():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"cannot be killed: {alive.keys()}"
            time.sleep(0.02)
        self.process.wait()


@contextlib.contextmanager
def job(command: list[str], **environment: str) -> Iterator[Job]:
    """Start `command` in the project's folder, in a session of its own; kill what is left of it at the end."""
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    with tempfile.TemporaryDirectory(prefix="job-") as name:
        folder = Path(name)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ladder.ROOT,
                env=inherited | {"PYTHONPATH": str(ladder.ROOT)} | environment | {_MARK: mark},
                start_new_session=True,
            )
        started = Job(process, mark, folder)
        try:
            yield started
        finally:
            started.kill()
            started.final_output = {"out": started.out, "err": started.err}


def torchrun(*argv: str, processes: int = 2, restarts: int = 0) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*command, "--max-restarts", str(restarts), *argv]


def launcher(*argv: str, processes: int = 2, restarts: int = 0) -> list[str]:
    command = [sys.executable, "-m", "common.accelerator", "launch", "--cpu", "--num_processes", str(processes)]
    return [*command, "--max_restarts", str(restarts), *argv]


def script(level: str) -> str:
    return str(ladder.script(level))


def plain(level: str, *argv: str) -> list[str]:
    """The level as one process."""
    return [sys.executable, script(level), *argv]


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints under `folder` by their numbers, whichever level wrote them.

    `glob`, unlike a Path's, takes no harm from a folder that is renamed meanwhile.
    """
    found = {}
    for manifest in glob.glob(f"{folder}/**/manifest.json", recursive=True):
        checkpoint = Path(manifest).parent
        name = re.fullmatch(r"checkpoint[-_](\d+)", checkpoint.name)
        if name:  # and not one that is being written, or has been put aside
            found[int(name[1])] = checkpoint
    return found


def newest_checkpoint(folder: Path) -> int:
    """The number of the newest complete checkpoint; -1 without any."""
    return max(complete_checkpoints(folder), default=-1)


def run_to_end(command: list[str], seconds: float = PATIENCE, **environment: str) -> subprocess.CompletedProcess:
    """`command`, when it has ended and no process of it is left."""
    with job(command, **environment) as started:
        code = started.end(seconds)
        return subprocess.CompletedProcess(command, code, started.out, started.err)


def run_all_to_end(
    commands: dict[Hashable, list[str]], at_once: int = 4, **environment: str
) -> dict[Hashable, subprocess.CompletedProcess]:
    """`run_to_end` of each command, some of them at once: what waits for a time-out leaves the cores to the others."""
    with ThreadPoolExecutor(at_once) as pool:
        endings = {key: pool.submit(run_to_end, command, **environment) for key, command in commands.items()}
        return {key: ending.result() for key, ending in endings.items()}


def on_tmpfs(folder: Path, options: str, *commands: list[str]) -> list[str]:
    """A command that runs `commands` one after another, whatever their exit codes, on a small disk at `folder`.

    The disk lives in a mount namespace of its own and goes with the last process in it. The exit code is the last
    command's; after each command its code is on stdout as "code N".
    """
    program = " ; ".join(f"{shlex.join(command)} ; code=$? ; echo code $code" for command in commands)
    mount = f"mount -t tmpfs -o {options} none {shlex.quote(str(folder))}"
    return ["unshare", "--mount", "sh", "-c", f"{mount} && {{ {program} ; exit $code ; }}"]


def can_mount() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(on_tmpfs(Path(folder), "ro", ["true"]), capture_output=True).returncode == 0


MOUNTED = pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root on Linux")
