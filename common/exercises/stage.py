"""The run of a solution on the ranks of a process group, in rounds, with an end to every wait.

A job is the part of an exercise that runs on each rank: it loads the learner's file, calls what is there and returns
what the checker compares. Every way in which a solution fails to return ends here in one sentence with the learner's
own line: a gap that is left, an exception, a collective that nobody answers, a loop without an end.
"""

import contextlib
import importlib.util
import linecache
import os
import pickle
import re
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from common.process_group import process_group
from common.processes import RankFailed, ranks

SECONDS = 8  # that a solution has on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
CHECKERS = str(Path(__file__).parent)
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# The names of torch's functions that wait for other ranks, send and recv among them.
COLLECTIVE = re.compile("reduce|gather|scatter|broadcast|barrier|send|recv|all_to_all|wait")
# The beginning of a line of the C++ log in an error of gloo, with time and place.
GLOO_LOG = re.compile(r"^\[rank\d+\]:\[[^\]]*\] ")
# gloo's words for "another rank has left": the consequence of that rank's error, and no error of its own.
CONSEQUENCES = ("Timed out", "timeout", "Connection closed by peer", "reset by peer", "Broken pipe")


class SolutionFailed(Exception):
    """The solution could not be run to its end; the message is a finding."""


class Place(NamedTuple):
    """A line of the learner's file, or of a checker that has called it."""

    file: str
    line: int
    waits: bool = True  # for another rank; else it computes

    def __str__(self) -> str:
        return f"line {self.line} of {Path(self.file).name}"

    @property
    def code(self) -> str:
        linecache.checkcache(self.file)  # the file may have been mended since the last check
        return linecache.getline(self.file, self.line).strip()


class Failure(NamedTuple):
    """An error that has ended a job on one rank, which the rank leaves in a file.

    So it is known too if another rank has to be ended.
    """

    error: str
    place: Place | None
    notes: tuple[str, ...] = ()
    is_consequence: bool = False
    is_finding: bool = False  # the error is a sentence for the learner already


def load(path: str) -> ModuleType:
    """The learner's file as a module, newly executed."""
    spec = importlib.util.spec_from_file_location("solution", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_name(path: str, name: str) -> Callable[..., Any]:
    """The function or class `name` of the learner's file.

    Raises:
        SolutionFailed: if the file does not define it.
    """
    found = getattr(load(path), name, None)
    if not callable(found):
        raise SolutionFailed(f"{Path(path).name} defines no {name}: keep the name that the starter file gives it")
    return found


def in_rounds(world_sizes: Sequence[int], findings: Callable[[int], Sequence[str | None]]) -> list[str]:
    """The findings of the first round that has any. Every round is on another number of ranks.

    Only a solution that was right in one round comes to the next. So what is wrong then is a number that was written
    where the world size or the rank belongs.

    Args:
        findings: given the number of ranks, what is wrong on so many of them; an entry of None is no finding.
    """
    before = None
    for world_size in world_sizes:
        try:
            found = [finding for finding in findings(world_size) if finding]
        except SolutionFailed as failure:
            found = [str(failure)]
        if found and before:
            title = (
                f"on {number_of_ranks(world_size)}, after all was right on {before}: the number of ranks is"
                f" dist.get_world_size(), and that of a rank dist.get_rank(). Is there a {before} in your code, or"
                " another number, for one of them?"
            )
            return ["\n".join([title, *(textwrap.indent(finding, "    ") for finding in found)])]
        if found:
            return found
        before = world_size
    return []


def number_of_ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def on_ranks(
    world_size: int,
    job: Callable[[str], Any],
    path: Path,
    why_it_hangs: Callable[[Sequence[Place | None]], str | None] = lambda places: None,
) -> list[Any]:
    """The results of `job(path)` on each of `world_size` ranks.

    Args:
        why_it_hangs: an explanation, if there is one, given the place where each rank waits (None: it has returned).

    Raises:
        SolutionFailed: if the job does not return on every rank; the message says why.
    """
    solution = str(path.resolve())
    pool = ranks(world_size, on_cpu=True)
    with tempfile.TemporaryDirectory(prefix="exercise-") as name:
        folder = Path(name)
        lost = None
        values = []
        try:
            values = pool.run(
                _play,
                job,
                solution,
                name,
                SECONDS,
                timeout=PATIENCE + SECONDS,
                environment=ONE_RANK_A_MACHINE,
            )
        except RankFailed as error:
            lost = str(error)
        failures = {}
        for file in sorted(folder.glob("*.failure")):
            failures[int(file.stem)] = pickle.loads(file.read_bytes())
        errors = {rank: failure for rank, failure in failures.items() if not failure.is_consequence}
        if failures:
            pool.stop()  # nobody knows what a collective has left behind
        if errors:
            raise SolutionFailed(_explained(errors, world_size, path.name))
        if lost:
            stuck = {}
            for file in folder.glob("*.stuck"):
                stuck[int(file.stem)] = pickle.loads(file.read_bytes())
            if not stuck:
                raise SolutionFailed(_ended(lost))
            places = []
            for rank in range(world_size):
                places.append(failures[rank].place if rank in failures else stuck.get(rank))
            raise SolutionFailed(_hang(places, why_it_hangs(places)))
        if failures:
            raise SolutionFailed(_explained(failures, world_size, path.name))
    return values


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
        watchdog = _watchdog(seconds, files / f"{rank}.stuck", path)
        watchdog.start()
        try:
            with group_that_stays():
                value = job(path)
        except BaseException as error:
            (files / f"{rank}.failure").write_bytes(pickle.dumps(_failure(error, path)))
            os._exit(1)  # which closes the connections, so that nobody waits for this rank any more
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

    def leave() -> None:
        stack = traceback.extract_stack(sys._current_frames()[watched])
        draft = report.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(_place_in(stack, path)))
        draft.rename(report)  # so that nobody reads a half of it, who ends this process at the same moment
        os._exit(1)  # which closes the connections, as above

    watchdog = threading.Timer(seconds, leave)
    watchdog.daemon = True
    return watchdog


@contextlib.contextmanager
def group_that_stays() -> Iterator[None]:
    """A block in which nobody may destroy the group of all ranks; one that a solution has made it may."""
    destroy = dist.destroy_process_group

    def refuse(group: Any = None) -> None:
        if group not in (None, dist.group.WORLD):
            return destroy(group)
        raise SolutionFailed(
            "destroy_process_group was called: the program that calls your code still needs the group of all ranks, and"
            " destroys it itself at its end. Leave this call out"
        )

    with mock.patch.object(dist, "destroy_process_group", refuse):
        yield


def _wait_for_all(store: dist.Store, what: str, rank: int, world_size: int) -> None:
    store.set(f"{what}/{rank}", "")
    store.wait([f"{what}/{other}" for other in range(world_size)])


def _failure(error: BaseException, path: str) -> Failure:
    if isinstance(error, SolutionFailed):
        return Failure(str(error), place=None, is_finding=True)
    places = [Place(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename == path:
        places.append(Place(path, error.lineno or 0))
    of_the_learner = [place for place in places if place.file == path]
    if isinstance(error, NotImplementedError) and of_the_learner:
        sentence = f"{of_the_learner[-1]} is still a gap: {error}"
        return Failure(sentence, of_the_learner[-1], is_finding=True)
    message = GLOO_LOG.sub("", str(error).partition("\n")[0])
    return Failure(
        error=f"{type(error).__name__}: {message}",
        place=of_the_learner[-1] if of_the_learner else None,
        notes=tuple(getattr(error, "__notes__", [])),
        is_consequence=any(sign in message for sign in CONSEQUENCES),
    )


def _explained(failures: dict[int, Failure], world_size: int, file: str) -> str:
    """The sentence about an exception: which one, on which ranks, in which line."""
    rank, failure = next(iter(failures.items()))
    if failure.is_finding:
        return failure.error
    where = "on every rank" if len(failures) == world_size else f"on rank {rank}"
    if failure.place is None:
        notes = failure.notes or ["Does it have the signature of the starter file?"]
        return "\n    ".join([f"{where} the call of {file} raised {failure.error}", *notes])
    sentence = f"{where} {failure.place} raised {failure.error}"
    return "\n    ".join([sentence, failure.place.code, *failure.notes])


def _ended(lost: str) -> str:
    """The sentence about a rank whose process has ended, given what the pool says of all ranks."""
    ends = [line for line in lost.splitlines() if "exit code" in line]
    # A rank with an exception, and one that is stuck, end with 1: look for another one first.
    others = [line for line in ends if not line.endswith("exit code 1")]
    [end, *_] = others or ends or [lost]
    sentence = f"a process has ended, and not by an exception: {end}"
    if end.endswith("exit code -6"):
        sentence += (
            "\n    gloo ends a rank that receives more bytes than it has room for: the ranks' tensors differ in size or"
            " dtype"
        )
    return sentence


def _hang(places: Sequence[Place | None], reason: str | None) -> str:
    """The sentence about ranks that did not return, with the lines where they are, side by side."""
    lines = [f"after {SECONDS} seconds not every rank had returned; these are the lines where they are:"]
    for rank, place in enumerate(places):
        where = f"{place}: {place.code}" if place else "has returned"
        lines.append(f"    rank {rank}: {where}")
    looping = [str(rank) for rank, place in enumerate(places) if place and not place.waits]
    if looping:
        who = f"ranks {' and '.join(looping)} wait" if len(looping) > 1 else f"rank {looping[0]} waits"
        reason = f"{who} for nobody: a loop does not end there"
    elif reason is None and None in places:
        reason = "a rank that has returned does not answer: all ranks must call the same collectives, equally often"
    elif reason is None:
        reason = "they wait for each other: all ranks must call the same collectives, in the same order"
    return "\n".join([*lines, f"    {reason}"])


def _place_in(stack: traceback.StackSummary, path: str) -> Place:
    """The innermost line of the learner's file in a stack, or else of the checker that called it."""
    places = [Place(frame.filename, frame.lineno or 0) for frame in reversed(stack)]
    of_the_learner = [place for place in places if place.file == path]
    of_checkers = [place for place in places if place.file.startswith(CHECKERS) and place.file != __file__]
    innermost = next(chain(of_the_learner, of_checkers, places))
    of_torch = [frame for frame in stack if "/torch/distributed/" in frame.filename]
    in_a_collective = any(COLLECTIVE.search(frame.name) for frame in of_torch)
    # No Python function of torch is called from a line with a handle's wait(), or from a backward of DDP.
    in_cpp = "wait" in innermost.code or "backward" in innermost.code
    return innermost._replace(waits=in_a_collective or in_cpp)
