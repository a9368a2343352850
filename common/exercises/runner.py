"""The run of a solution on the ranks of a process group, with an end to every wait.

Nearly every way in which a solution fails to return ends in a Mistake, with the learner's own line where it is known: a
gap that is left, an exception, a collective that nobody answers, a loop without an end.

    main thread of each rank                           solution thread
    makes a group of its own, runs `reference`
    waits for an outcome, for at most SECONDS          imports the solution, runs `attempt`
    has Returned or a Mistake, else the rank is Stuck  notes its outcome, or waits on
    meets the other ranks in its own group
    leaves the groups, if the solution has returned
"""

import importlib.machinery
import importlib.util
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

from common.exercises import load
from common.exercises.compare import Mistake, by_rank
from common.exercises.traffic import simulated_network
from common.process_group import leave_process_group
from common.processes import RankFailed, ranks

WORLD_SIZES = (3, 2)  # three first: in a ring of two the right neighbour is the left one too
SECONDS = 8  # the time of a solution on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Returned(NamedTuple):
    """The results of `attempt` and of `reference` on a rank."""

    actual: Any
    expected: Any


class Stuck(NamedTuple):
    """The line that a rank had reached when the time was over."""

    line: str


# A Mistake is returned, because a raised one would end the job before the other ranks have reported their lines.
Outcome = Returned | Stuck | Mistake


def check_solution(name: str, path: Path) -> None:
    """Check the solution in `path` on all numbers of ranks. Raises Mistake if it does not pass."""
    checker = load(name)
    for world_size in WORLD_SIZES:
        try:
            returned = _run_on_ranks(world_size, name, path)
            checker.check([rank.actual for rank in returned], [rank.expected for rank in returned])
        except Mistake as mistake:
            text = f"on {world_size} ranks: {mistake}"
            if world_size != WORLD_SIZES[0]:
                question = "does a fixed number stand where dist.get_world_size() or dist.get_rank() belongs?"
                text = f"all was right on {WORLD_SIZES[0]} ranks: {question}\n{text}"
            raise Mistake(text) from mistake


def _run_on_ranks(world_size: int, name: str, path: Path) -> list[Returned]:
    """The results of each rank. Raises Mistake if the solution does not return on every rank."""
    pool = ranks(world_size, on_cpu=True)
    arguments = (name, path.resolve(), SECONDS)
    try:
        outcomes = pool.run(_run_on_rank, *arguments, timeout=PATIENCE + SECONDS, environment=ONE_RANK_A_MACHINE)
    except RankFailed as error:
        sentence = "a rank failed, and the line of your code is not known"
        if error.process_ended:
            sentence = "a process ended. Gloo ends one that receives more bytes than it has room for"
        raise Mistake(f"{sentence}\n{error}") from error
    if all(isinstance(outcome, Returned) for outcome in outcomes):
        return outcomes
    pool.stop()  # in its processes a thread may still wait
    lines = []
    for outcome in outcomes:
        if isinstance(outcome, Mistake):
            raise outcome  # the other ranks may have waited for this one
        lines.append(outcome.line if isinstance(outcome, Stuck) else "has returned")
    raise Mistake(
        f"after {SECONDS} seconds not every rank had returned. All ranks must call the same collectives in the same "
        "order, a rank without samples or parameters of its own too. While a rank sends, its neighbour must receive",
        by_rank(lines),
    )


def _run_on_rank(name: str, path: Path, seconds: int) -> Outcome:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    # The last barrier has a group of its own. In the default group it would answer a collective that only one rank of
    # the solution has called.
    everyone: Any = dist.new_group()
    checker = load(name)
    expected = checker.reference()
    outcomes: list[Outcome] = []
    # The thread of a solution that does not return is left behind: as a daemon it ends with the process.
    thread = threading.Thread(target=_attempt, args=(checker, path, expected, outcomes), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings would stand before the findings
        thread.start()
        thread.join(seconds)
        outcome = outcomes[0] if outcomes else Stuck(_line_of(thread, path, checker))
    # No rank leaves while another one is stuck: the lost connection would end its wait before its line is known.
    dist.barrier(everyone)
    if isinstance(outcome, Returned):
        leave_process_group()
    return outcome


def _attempt(checker: ModuleType, path: Path, expected: Any, outcomes: list[Outcome]) -> None:
    try:
        loader = importlib.machinery.SourceFileLoader("solution", str(path))  # the name of the file may end in anything
        solution = importlib.util.module_from_spec(importlib.util.spec_from_loader("solution", loader))
        with simulated_network() as traffic:
            loader.exec_module(solution)
            actual = checker.attempt(solution, traffic)
        traffic.check_all_waited()
        outcomes.append(Returned(actual, expected))
    except Mistake as mistake:
        outcomes.append(mistake)
    except BaseException as error:
        outcomes.append(_mistake(error, path, checker))


def _mistake(error: BaseException, path: Path, checker: ModuleType) -> Mistake:
    """The mistake that an error of the solution shows, and the line where it was raised."""
    stack = traceback.extract_tb(error.__traceback__)
    line = _line_in(path, stack)
    if "raise NotImplementedError" in line:
        return Mistake(f"this line is still a gap\n    {line}")
    message = str(error).partition("\n")[0]
    raised = f"rank {dist.get_rank()} raised {type(error).__name__}: {message}"
    if line:
        return Mistake(f"{raised}\n    {line}")
    if isinstance(error, SyntaxError):  # whose message names the line
        return Mistake(raised)
    line = _line_in(Path(checker.__file__), stack)
    return Mistake(f"{raised}\n    {line}\nDoes your code define, take and return what the starter file says?")


def _line_of(thread: threading.Thread, path: Path, checker: ModuleType) -> str:
    """The line that a solution has reached, or the checker that has called it; empty if it has just returned."""
    frame = sys._current_frames().get(thread.ident)
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    return _line_in(path, stack) or _line_in(Path(checker.__file__), stack)


def _line_in(path: Path, stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if frame.filename == str(path):
            return f"line {frame.lineno} of {path.name}: {frame.line}"
    return ""
