"""The run of a solution on the ranks of a process group, with an end to every wait.

A job loads the learner's file on each rank, calls what is there and returns the facts that a checker compares. Every
way in which a solution fails to return ends here in a mistake with the learner's own line: a gap that is left, an
exception, a collective that nobody answers, a loop without an end.
"""

import contextlib
import importlib.util
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from common.exercises.mistake import Mistake, SolutionFailed
from common.process_group import process_group
from common.processes import RankFailed, ranks

SECONDS = 8  # that a solution has on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
End = Literal["returned", "raised", "stuck"]


class Report(NamedTuple):
    """The end of a job on a rank, which leaves it in a file: it is there too if another rank has to be ended.

    Attributes:
        line: the learner's, or of the checker that has called it.
        mistake: None where the time was over, or the job has returned.
        moment: on the clock that all processes of this machine have.
    """

    end: End
    line: str
    mistake: Mistake | None
    moment: float


def load_name(path: str, name: str) -> Callable[..., Any]:
    """The function or class `name` of the learner's file, which is newly executed.

    Raises:
        SolutionFailed: if the file does not define it.
    """
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise SolutionFailed(Mistake("no such name", f"{Path(path).name} defines no {name}"))
    return found


def on_ranks(world_size: int, job: Callable[[str], Any], path: Path) -> list[Any]:
    """The results of `job(path)` on each of `world_size` ranks.

    Raises:
        SolutionFailed: if the job does not return on every rank; the message says why.
    """
    pool = ranks(world_size, on_cpu=True)
    with tempfile.TemporaryDirectory(prefix="exercise-") as folder:
        try:
            return pool.run(
                _play,
                job,
                str(path.resolve()),
                folder,
                SECONDS,
                timeout=PATIENCE + SECONDS,
                environment=ONE_RANK_A_MACHINE,
            )
        except RankFailed as error:
            reports = {}
            for file in Path(folder).glob("*.report"):
                reports[int(file.stem)] = pickle.loads(file.read_bytes())
            raise SolutionFailed(_cause(reports, world_size)) from error


def _cause(reports: dict[int, Report], world_size: int) -> Mistake:
    """Why the job did not return on every rank.

    The first rank that raised or was stuck has left, and what other ranks have met since then came of it.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    failures = [report for report in reports.values() if report.end != "returned"]
    if not failures:
        return Mistake("ended", f"rank {silent[0]}")
    first = min(failures, key=lambda report: report.moment)
    if first.end == "stuck":
        lines = []
        for rank in range(world_size):
            line = reports[rank].line if rank in reports else "has ended"
            lines.append(f"    rank {rank}: {line}")
        return Mistake("stuck", f"after {SECONDS} seconds not every rank had returned", "\n".join(lines))
    return first.mistake


def _play(job: Callable[[str], Any], path: str, folder: str, seconds: int) -> Any:
    """The value of the job on this rank. A rank that is not ready within `seconds` writes where it is, and exits."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    files = Path(folder)
    store = dist.FileStore(str(files / "meeting"), world_size)
    store.set_timeout(timedelta(seconds=PATIENCE))
    group = process_group(
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE),
    )
    with group, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's name a line of the checker, and would stand before the findings
        report = files / f"{rank}.report"
        watchdog = _watchdog(seconds, report, path)
        watchdog.start()
        try:
            value = job(path)
        except BaseException as error:
            line = _innermost(traceback.extract_tb(error.__traceback__), Path(path))
            _write(report, "raised", line, _mistake_of(error, line, path, rank))
            _leave()
        finally:
            watchdog.cancel()
        _write(report, "returned", "has returned")
        store.set_timeout(timedelta(seconds=seconds + 1))
        # By no collective: it would answer one of a rank whose solution has called one more. And a rank that left
        # would close its connections: whoever still waits for it would see that, and could not be asked where.
        with contextlib.suppress(RuntimeError):
            store.set(f"end/{rank}", "")
            store.wait([f"end/{other}" for other in range(world_size)])
        return value


def _watchdog(seconds: int, report: Path, path: str) -> threading.Timer:
    """A thread that writes after `seconds` where the thread that calls this one is, and ends the process.

    It asks Python. The thread of `faulthandler` reads the frames of a running thread without the interpreter's lock: in
    3 of 100 reports of a loop it found no frame, and then it crashed.
    """
    watched = threading.get_ident()

    def report_and_leave() -> None:
        stack = traceback.extract_stack(sys._current_frames()[watched])
        line = _innermost(stack, Path(path)) or _innermost(stack, Path(__file__).parent)
        _write(report, "stuck", line)
        _leave()

    watchdog = threading.Timer(seconds, report_and_leave)
    watchdog.daemon = True
    return watchdog


def _write(file: Path, end: End, line: str, mistake: Mistake | None = None) -> None:
    draft = file.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(Report(end, line, mistake, time.monotonic())))
    draft.rename(file)  # so that nobody reads a half of it, who ends this process at the same moment


def _leave() -> None:
    """End this process, which closes its connections, so that nobody waits for this rank any more."""
    os._exit(1)


def _innermost(stack: traceback.StackSummary, place: Path) -> str:
    """The innermost line that is of a file, or of a file in a folder; empty if there is none."""
    for frame in reversed(stack):
        file = Path(frame.filename)
        if place in (file, file.parent):
            return _line(file, frame.lineno, frame.line)
    return ""


def _line(file: Path, number: int | None, code: str | None) -> str:
    return f"line {number} of {file.name}: {(code or '').strip()}"


def _mistake_of(error: BaseException, line: str, path: str, rank: int) -> Mistake:
    """The mistake that an exception on this rank shows, and the learner's line."""
    if isinstance(error, SolutionFailed):
        return error.mistake
    if isinstance(error, NotImplementedError) and line:
        return Mistake("gap", details=f"    {line}")
    if isinstance(error, SyntaxError) and error.filename == path:
        line = _line(Path(path), error.lineno, error.text)
    message = str(error).partition("\n")[0]
    raised = f"{type(error).__name__}: {message}"
    if line:
        return Mistake("raised", f"rank {rank}", f"    {line}\n    {raised}")
    return Mistake("wrong call", f"rank {rank}", f"    the call of {Path(path).name} raised {raised}")
