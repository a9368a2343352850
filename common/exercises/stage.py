"""The run of a solution on the ranks of a process group, with an end to every wait.

Every way in which a solution fails to return ends in a Mistake with the learner's own line: a gap that is left, an
exception, a collective that nobody answers, a loop without an end.
"""

import importlib.util
import os
import sys
import threading
import traceback
import warnings
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from common.exercises import load
from common.exercises.mistake import Mistake
from common.exercises.traffic import observed
from common.process_group import leave_process_group
from common.processes import RankFailed, ranks

WORLD_SIZES = (3, 2)  # three first: in a ring of two the right neighbour is the left one too
SECONDS = 8  # that a solution has on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Stuck(Mistake):
    """A solution whose time was over; the text is the line that it had reached on its rank."""


def check(name: str, path: Path) -> str | None:
    """What a learner is told of the first mistake of the solution in `path`; None if it passed."""
    checker = load(name)
    for number, world_size in enumerate(WORLD_SIZES):
        try:
            made, expected = _run_on_ranks(world_size, name, path)
            checker.check(made, expected)
        except Mistake as mistake:
            text = f"on {world_size} ranks: {mistake}"
            if number > 0:
                question = "does a fixed number stand where dist.get_world_size() or dist.get_rank() belongs?"
                text = f"all was right on {WORLD_SIZES[0]} ranks: {question}\n{text}"
            return text
    return None


def _run_on_ranks(world_size: int, name: str, path: Path) -> tuple[list, list]:
    """What `attempt` and what `reference` returned, each by rank.

    Raises:
        Mistake: if the solution does not return on every rank.
    """
    pool = ranks(world_size, on_cpu=True)
    arguments = (name, path.resolve(), SECONDS)
    try:
        outcomes = pool.run(_run_on_rank, *arguments, timeout=PATIENCE + SECONDS, environment=ONE_RANK_A_MACHINE)
    except RankFailed as error:
        sentence = "a process ended without an exception (gloo ends one that receives more bytes than it has room for)"
        raise Mistake(f"{sentence}\n{error}") from error
    if not any(isinstance(outcome, Mistake) for outcome in outcomes):
        made, expected = zip(*outcomes, strict=True)
        return list(made), list(expected)
    pool.stop()  # in its processes a thread may still wait
    lines = {}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Mistake) and not isinstance(outcome, Stuck):
            raise outcome  # the other ranks may have waited for this one
        lines[f"rank {rank}"] = outcome if isinstance(outcome, Stuck) else "has returned"
    raise Mistake(
        f"after {SECONDS} seconds not every rank had returned. All ranks must call the same collectives in the same "
        "order, a rank without samples or parameters of its own too. While a rank sends, its neighbour must receive",
        lines,
    )


def _run_on_rank(name: str, path: Path, seconds: int) -> tuple[Any, Any] | Mistake:
    """What `attempt` and what `reference` returned on this rank, in a process group of all ranks."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    timeout = timedelta(seconds=PATIENCE)
    group_store = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    expected = load(name).reference()
    outcome: tuple[Any, Any] | Mistake
    try:
        outcome = _attempt_within(seconds, name, path), expected
    except Mistake as mistake:
        outcome = mistake
    # No rank leaves the group while another one is stuck: the closed connections would end its wait with an error
    # before the line where it waits is known. The ranks meet in the store, because a collective would answer a rank
    # whose solution has called one too many.
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{other}" for other in range(world_size)])
    if not isinstance(outcome, Mistake):
        leave_process_group()
    return outcome


def _attempt_within(seconds: int, name: str, path: Path) -> Any:
    """What `attempt` returned, on a thread of its own, which can be abandoned when the time is over.

    Raises:
        Mistake: if it does not return.
    """
    checker = load(name)
    outcome: Future = Future()

    def attempt() -> None:
        try:
            with observed() as traffic:
                made = checker.attempt(_module_of(path), traffic)
            outcome.set_result(made)
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=attempt, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings would stand before the findings
        thread.start()
        thread.join(seconds)
    frame = sys._current_frames().get(thread.ident)
    if not outcome.done():
        stack = traceback.extract_stack(frame)
        raise Stuck(_line_in(path, stack) or _line_in(Path(checker.__file__), stack))
    error = outcome.exception()
    if error:
        raise _mistake_of(error, path, checker)
    return outcome.result()


def _module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _mistake_of(error: BaseException, path: Path, checker: ModuleType) -> Mistake:
    """The mistake that an exception on this rank shows, and the line where it was raised."""
    if isinstance(error, Mistake):
        return error
    stack = traceback.extract_tb(error.__traceback__)
    line = _line_in(path, stack)
    if line and isinstance(error, NotImplementedError):
        return Mistake(f"this line is still a gap\n    {line}")
    message = str(error).partition("\n")[0]
    raised = f"rank {dist.get_rank()} raised {type(error).__name__}: {message}"
    if line:
        return Mistake(f"{raised}\n    {line}")
    if isinstance(error, SyntaxError):  # whose message names the line
        return Mistake(raised)
    line = _line_in(Path(checker.__file__), stack)
    return Mistake(f"{raised}\n    {line}\nDoes your code define, take and return what the starter file says?")


def _line_in(path: Path, stack: traceback.StackSummary) -> str:
    """The innermost line that is of this file; empty if there is none."""
    for frame in reversed(stack):
        if frame.filename == str(path):
            return f"line {frame.lineno} of {path.name}: {frame.line}"
    return ""
