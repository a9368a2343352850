"""The run of a solution on the ranks of a process group, with an end to every wait.

A job is the `run` of a checker: on each rank it loads the learner's file, calls what is there and returns what the
checker compares. Every way in which a solution fails to return ends here in one sentence with the learner's
own line: a gap that is left, an exception, a collective that nobody answers, a loop without an end.
"""

import contextlib
import importlib.util
import os
import pickle
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from common.process_group import process_group
from common.processes import RankFailed, ranks

SECONDS = 8  # that a solution has on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# gloo's words for "another rank has left": the consequence of that rank's error, and no error of its own.
CONSEQUENCES = ("Timed out", "timeout", "Connection closed by peer", "reset by peer", "Broken pipe")
WHY_IT_HANGS = (
    "all ranks must call the same collectives, in the same order and equally often (one that has returned does not"
    " answer, and one without samples or parameters of its own has to); while a rank sends, its neighbour must receive;"
    " and every loop must end"
)


class SolutionFailed(Exception):
    """The solution could not be run to its end; the message is a finding."""


class Report(NamedTuple):
    """Why a rank has not come to the end of a job.

    It leaves this in a file, which is there too if another rank has to be ended.
    """

    line: str | None  # the learner's, or of the checker that has called it
    error: str | None = None  # a sentence; None: the time was over
    is_consequence: bool = False  # of another rank's end


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
        raise SolutionFailed(f"{Path(path).name} defines no {name}: keep the name that the starter file gives it")
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
            # A rank with an exception, and one that is stuck, end with 1.
            ends = [line for line in str(error).splitlines() if not line.endswith("exit code 1")]
        reports = {}
        for file in sorted(Path(folder).glob("*.report")):
            reports[int(file.stem)] = pickle.loads(file.read_bytes())
    errors = [report for report in reports.values() if report.error]
    errors.sort(key=lambda report: report.is_consequence)
    if errors and not errors[0].is_consequence:
        raise SolutionFailed(errors[0].error)
    if len(errors) < len(reports):
        lines = [f"after {SECONDS} seconds not every rank had returned; these are the lines where they are:"]
        for rank in range(world_size):
            line = reports[rank].line if rank in reports else "has returned"
            lines.append(f"    rank {rank}: {line}")
        raise SolutionFailed("\n".join([*lines, f"    {WHY_IT_HANGS}"]))
    if ends:
        raise SolutionFailed(
            f"a process has ended, and not by an exception: {ends[0]} (gloo ends one that receives more bytes than it"
            " has room for)"
        )
    raise SolutionFailed(errors[0].error)


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
            _leave(report, _failure(error, path, rank))
        finally:
            watchdog.cancel()
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
        of_the_learner = [frame for frame in stack if frame.filename == path]
        of_checkers = [frame for frame in stack if Path(frame.filename).parent == Path(__file__).parent]
        innermost = [*stack, *of_checkers, *of_the_learner][-1]
        _leave(report, Report(_line(innermost.filename, innermost.lineno, innermost.line)))

    watchdog = threading.Timer(seconds, report_and_leave)
    watchdog.daemon = True
    return watchdog


def _leave(file: Path, report: Report) -> None:
    """End this process, which closes its connections, so that nobody waits for this rank any more."""
    draft = file.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(report))
    draft.rename(file)  # so that nobody reads a half of it, who ends this process at the same moment
    os._exit(1)


def _line(file: str, number: int | None, code: str | None) -> str:
    return f"line {number} of {Path(file).name}: {(code or '').strip()}"


def _failure(error: BaseException, path: str, rank: int) -> Report:
    """The sentence about an exception on this rank, with the learner's line."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            line = _line(path, frame.lineno, frame.line)
    if isinstance(error, SyntaxError) and error.filename == path:
        line = _line(path, error.lineno, error.text)
    message = str(error).partition("\n")[0]
    raised = f"raised {type(error).__name__}: {message}, on rank {rank}"
    is_consequence = any(sign in message for sign in CONSEQUENCES)
    if isinstance(error, SolutionFailed):
        return Report(line, str(error))
    if line is None:
        hint = "Does it take, and return, what the starter file says?"
        return Report(None, f"the call of {Path(path).name} {raised}\n    {hint}", is_consequence)
    if isinstance(error, NotImplementedError):
        return Report(line, f"this line is still a gap: {line}")
    return Report(line, f"{line}\n    {raised}", is_consequence)
