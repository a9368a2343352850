"""The run of a solution: loaded from its file on every rank of a process group, with an end to waiting."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

from common import process_group as groups
from common.processes import RankFailed, ranks

PATIENCE = 20  # seconds that a collective of a solution may wait
GAVE_UP = ("Timed out", "timeout", "Connection closed by peer", "no answer", "reset by peer")


class SolutionFailed(Exception):
    """The solution could not be run to its end; the message is a finding."""


def function_in(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the solution.

    Raises:
        SolutionFailed: if the file does not define it.
    """
    spec = importlib.util.spec_from_file_location("solution", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise SolutionFailed(f"{path} defines no function {name}")
    return found


def process_group() -> AbstractContextManager[None]:
    """A gloo group of all ranks, whose collectives give up after PATIENCE."""
    return groups.process_group(timeout=timedelta(seconds=PATIENCE))


def on_ranks(world_size: int, job: Callable[..., Any], path: Path) -> list[Any]:
    """The results of `job(path)` on each of `world_size` ranks.

    Raises:
        SolutionFailed: if it does not return on every rank; the message says why.
    """
    try:
        return ranks(world_size).run(job, str(path), timeout=6 * PATIENCE)
    except RankFailed as failure:
        raise SolutionFailed(_explained(str(failure), world_size)) from None


def _explained(failure: str, world_size: int) -> str:
    lines = [line for line in failure.splitlines() if line.startswith("rank ")]
    errors = [line for line in lines if not any(sign in line for sign in GAVE_UP)]
    if errors:
        return f"on {world_size} ranks it raised: {errors[0]}"
    return f"on {world_size} ranks it hung: the ranks did not call the same collectives, as often, in the same order"
