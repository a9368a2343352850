"""The run of a solution on the ranks of a process group, with an end to every wait.

A job loads the learner's file on each rank, calls what is there and returns the facts that a checker compares. Every
way in which a solution fails to return ends here in a mistake with the learner's own line: a gap that is left, an
exception, a collective that nobody answers, a loop without an end.
"""

import importlib.util
import os
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from common.exercises.mistake import Mistake, SolutionFailed
from common.process_group import leave_process_group
from common.processes import RankFailed, ranks

SECONDS = 8  # that a solution has on every rank, from the import of its file to its return
PATIENCE = 60  # seconds for everything that is not the solution's, such as the start of the ranks
# Each rank is as on a machine of its own, so that a solution cannot take the ranks of one machine for all of them.
ONE_RANK_A_MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Returned(NamedTuple):
    """The end of a job that returned."""

    value: Any


class Stuck(NamedTuple):
    """The end of a job that ran out of time: the line that it had reached, in the learner's file or in the checker."""

    line: str


Outcome = Returned | Stuck | Mistake


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
    arguments = (job, str(path.resolve()), SECONDS)
    try:
        outcomes = pool.run(_outcome_on_rank, *arguments, timeout=PATIENCE + SECONDS, environment=ONE_RANK_A_MACHINE)
    except RankFailed as error:
        raise SolutionFailed(Mistake("ended", details=textwrap.indent(str(error), "    "))) from error
    if all(isinstance(outcome, Returned) for outcome in outcomes):
        return [outcome.value for outcome in outcomes]
    pool.stop()  # in its processes a thread may still wait
    for outcome in outcomes:
        if isinstance(outcome, Mistake):  # the other ranks may have waited for this one
            raise SolutionFailed(outcome)
    lines = []
    for rank, outcome in enumerate(outcomes):
        line = outcome.line if isinstance(outcome, Stuck) else "has returned"
        lines.append(f"    rank {rank}: {line}")
    raise SolutionFailed(Mistake("stuck", f"after {SECONDS} seconds not every rank had returned", "\n".join(lines)))


def _outcome_on_rank(job: Callable[[str], Any], path: str, seconds: int) -> Outcome:
    """Run the job on this rank, in a process group of all ranks."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), world_size, is_master=rank == 0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE),
    )
    outcome = _outcome_within(seconds, job, path)
    # The ranks tell each other by the store how they ended. A collective would answer a rank whose solution has called
    # one collective too many. And no rank leaves the group while another one is stuck: the closed connections would end
    # its wait with an error before the line where it waits is known.
    store.set(f"end/{rank}", type(outcome).__name__)
    ends = {store.get(f"end/{other}") for other in range(world_size)}
    if ends == {b"Returned"}:
        leave_process_group()
    return outcome


def _outcome_within(seconds: int, job: Callable[[str], Any], path: str) -> Outcome:
    """Run the job on a thread of its own, which can be abandoned when the time is over."""
    outcomes: list[Outcome] = []

    def run() -> None:
        try:
            outcomes.append(Returned(job(path)))
        except BaseException as error:
            outcomes.append(_mistake_of(error, path))

    thread = threading.Thread(target=run, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings would stand before the findings
        thread.start()
        thread.join(seconds)
    frame = sys._current_frames().get(thread.ident)
    if outcomes or frame is None:
        return outcomes[0]
    stack = traceback.extract_stack(frame)
    return Stuck(_innermost(stack, Path(path)) or _innermost(stack, Path(__file__).parent))


def _innermost(stack: traceback.StackSummary, place: Path) -> str:
    """The innermost line that is of a file, or of a file in a folder; empty if there is none."""
    for frame in reversed(stack):
        file = Path(frame.filename)
        if place in (file, file.parent):
            return _line(file, frame.lineno, frame.line)
    return ""


def _line(file: Path, number: int | None, code: str | None) -> str:
    return f"line {number} of {file.name}: {(code or '').strip()}"


def _mistake_of(error: BaseException, path: str) -> Mistake:
    """The mistake that an exception on this rank shows, and the learner's line."""
    line = _innermost(traceback.extract_tb(error.__traceback__), Path(path))
    rank = f"rank {dist.get_rank()}"
    if isinstance(error, SolutionFailed):
        return error.mistake
    if isinstance(error, NotImplementedError) and line:
        return Mistake("gap", details=f"    {line}")
    if isinstance(error, SyntaxError) and error.filename == path:
        line = _line(Path(path), error.lineno, error.text)
    message = str(error).partition("\n")[0]
    raised = f"{type(error).__name__}: {message}"
    if line:
        return Mistake("raised", rank, f"    {line}\n    {raised}")
    return Mistake("wrong call", rank, f"    the call of {Path(path).name} raised {raised}")
