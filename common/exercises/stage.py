"""The run of a solution on the ranks of a process group, with an end to every wait.

A job is the `run` of a checker: on each rank it loads the learner's file, calls what is there and returns what the
checker compares. Every way in which a solution fails to return ends here in one sentence with the learner's
own line: a gap that is left, an exception, a collective that nobody answers, a loop without an end.
"""

import contextlib
import functools
import importlib.util
import linecache
import os
import pickle
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

from common.process_group import process_group
from common.processes import RankFailed, ranks

SECONDS = 8  # that a solution has on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
CHECKERS = str(Path(__file__).parent)
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# gloo's words for "another rank has left": the consequence of that rank's error, and no error of its own.
CONSEQUENCES = ("Timed out", "timeout", "Connection closed by peer", "reset by peer", "Broken pipe")


class SolutionFailed(Exception):
    """The solution could not be run to its end; the message is a finding."""


class Place(NamedTuple):
    """A line of the learner's file, or of a checker that has called it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"line {self.line} of {Path(self.file).name}"

    @property
    def code(self) -> str:
        linecache.checkcache(self.file)  # the file may have been mended since the last check
        return linecache.getline(self.file, self.line).strip()


Places = Sequence[Place | None]  # of a hang, by rank; None: the rank has returned


class Report(NamedTuple):
    """Why a rank has not come to the end of a job.

    It leaves this in a file, which is there too if another rank has to be ended.
    """

    place: Place | None
    error: str | None = None  # None: the time was over
    is_consequence: bool = False  # of another rank's end
    is_finding: bool = False  # the error is a sentence for the learner already


def load_name(path: str, name: str) -> Callable[..., Any]:
    """The function or class `name` of the learner's file, which is newly executed.

    Raises:
        SolutionFailed: if the file does not define it.
    """
    spec = importlib.util.spec_from_file_location("solution", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise SolutionFailed(f"{Path(path).name} defines no {name}: keep the name that the starter file gives it")
    return found


def first_finding(checker: ModuleType, path: Path) -> str | None:
    """What is wrong on the first number of ranks, and in the first case, in which something is.

    Only a solution that was right on one number of ranks comes to the next. So what is wrong then is mostly a number
    that was written where the world size or the rank belongs.
    """
    why_it_hangs = getattr(checker, "why_it_hangs", lambda places: None)
    before = None
    for world_size in checker.WORLD_SIZES:
        for title, case in getattr(checker, "CASES", {"on {}": {}}).items():
            try:
                job = functools.partial(checker.run, **case)
                found = checker.finding(on_ranks(world_size, job, path, why_it_hangs))
            except SolutionFailed as failure:
                found = str(failure)
            if found:
                where = title.format("1 rank" if world_size == 1 else f"{world_size} ranks")
                if before:
                    where += (
                        f", after all was right on {before} (is there a {before} in your code, or another number, where"
                        " dist.get_world_size() or dist.get_rank() belongs?)"
                    )
                return f"{where}: {found}"
        before = world_size
    return None


def on_ranks(
    world_size: int, job: Callable[[str], Any], path: Path, why_it_hangs: Callable[[Places], str | None]
) -> list[Any]:
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
            ended = str(error)
        reports = {}
        for file in sorted(Path(folder).glob("*.report")):
            reports[int(file.stem)] = pickle.loads(file.read_bytes())
    errors = {rank: report for rank, report in reports.items() if report.error}
    own_errors = {rank: report for rank, report in errors.items() if not report.is_consequence}
    if own_errors:
        raise SolutionFailed(_explained(own_errors, world_size, path.name))
    if len(errors) < len(reports):
        places = [reports[rank].place if rank in reports else None for rank in range(world_size)]
        raise SolutionFailed(_hang(places, why_it_hangs(places)))
    # A rank with an exception, and one that is stuck, end with 1.
    ends = [line for line in ended.splitlines() if "exit code" in line and not line.endswith("exit code 1")]
    if errors and not ends:
        raise SolutionFailed(_explained(errors, world_size, path.name))
    hint = ""
    if ends and ends[0].endswith("-6"):
        hint = "; gloo ends a rank that receives more bytes than it has room for: the tensors differ in size or dtype"
    raise SolutionFailed(f"a process has ended, and not by an exception: {ends[0] if ends else ended}{hint}")


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
        _wait_for_all(store, "start", rank, world_size)
        report = files / f"{rank}.report"
        watchdog = _watchdog(seconds, report, path)
        watchdog.start()
        try:
            value = job(path)
        except BaseException as error:
            _leave(report, _failure(error, path))
        finally:
            watchdog.cancel()
        store.set_timeout(timedelta(seconds=seconds + 1))
        # By no collective: it would answer one of a rank whose solution has called one more. And a rank that left
        # would close its connections: whoever still waits for it would see that, and could not be asked where.
        with contextlib.suppress(RuntimeError):
            _wait_for_all(store, "end", rank, world_size)
        return value


def _watchdog(seconds: int, report: Path, path: str) -> threading.Timer:
    """A thread that writes after `seconds` where the thread that calls this one is, and ends the process.

    It asks Python. The thread of `faulthandler` reads the frames of a running thread without the interpreter's lock: in
    3 of 100 reports of a loop it found no frame, and then it crashed.
    """
    watched = threading.get_ident()

    def report_and_leave() -> None:
        stack = traceback.extract_stack(sys._current_frames()[watched])
        _leave(report, Report(_place_in(stack, path)))

    watchdog = threading.Timer(seconds, report_and_leave)
    watchdog.daemon = True
    return watchdog


def _leave(file: Path, report: Report) -> None:
    """End this process, which closes its connections, so that nobody waits for this rank any more."""
    draft = file.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(report))
    draft.rename(file)  # so that nobody reads a half of it, who ends this process at the same moment
    os._exit(1)


def _wait_for_all(store: dist.Store, what: str, rank: int, world_size: int) -> None:
    store.set(f"{what}/{rank}", "")
    store.wait([f"{what}/{other}" for other in range(world_size)])


def _failure(error: BaseException, path: str) -> Report:
    if isinstance(error, SolutionFailed):
        return Report(place=None, error=str(error), is_finding=True)
    places = [Place(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename == path:
        places.append(Place(path, error.lineno or 0))
    of_the_learner = [place for place in places if place.file == path]
    place = of_the_learner[-1] if of_the_learner else None
    if isinstance(error, NotImplementedError) and place:
        return Report(place, f"{place} is still a gap: {error}", is_finding=True)
    message = str(error).partition("\n")[0]
    is_consequence = any(sign in message for sign in CONSEQUENCES)
    return Report(place, f"{type(error).__name__}: {message}", is_consequence)


def _explained(errors: dict[int, Report], world_size: int, file: str) -> str:
    """The sentence about an exception: which one, on which ranks, in which line."""
    rank, report = next(iter(errors.items()))
    if report.is_finding:
        return report.error
    where = "every rank" if len(errors) == world_size else f"rank {rank}"
    if report.place is None:
        hint = "Does it have the signature of the starter file?"
        return f"the call of {file} raised {report.error}, on {where}\n    {hint}"
    return f"{report.place} raised {report.error}, on {where}\n    {report.place.code}"


def _hang(places: Places, reason: str | None) -> str:
    """The sentence about ranks that did not return, with the lines where they are, side by side."""
    lines = [f"after {SECONDS} seconds not every rank had returned; these are the lines where they are:"]
    for rank, place in enumerate(places):
        where = f"{place}: {place.code}" if place else "has returned"
        lines.append(f"    rank {rank}: {where}")
    if reason is None:
        reason = (
            "all ranks must call the same collectives, in the same order and equally often (one that has returned does"
            " not answer), and every loop must end"
        )
    return "\n".join([*lines, f"    {reason}"])


def _place_in(stack: traceback.StackSummary, path: str) -> Place:
    """The innermost line of the learner's file in a stack, or else of the checker that called it."""
    places = [Place(frame.filename, frame.lineno or 0) for frame in reversed(stack)]
    of_the_learner = [place for place in places if place.file == path]
    of_checkers = [place for place in places if place.file.startswith(CHECKERS) and place.file != __file__]
    return [*of_the_learner, *of_checkers, *places][0]
