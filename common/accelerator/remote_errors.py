"""Errors of one process that all processes raise, so that none of them waits for one that has failed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .operations import broadcast_object_list, gather_object
from .state import PartialState


class RemoteError(RuntimeError):
    """Raised on a process that met no error itself, because another process met one; it quotes that error."""


@contextlib.contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """A block after which all processes raise if one of them has raised in it. So none waits for one that failed.

    A collective: all processes must enter it.

    Raises:
        RemoteError: on the other processes.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as failure:
        error = failure
    rank = PartialState().process_index
    errors = gather_object([] if error is None else [f"rank {rank}: {type(error).__name__}: {error}"])
    if error is not None:
        raise error
    if errors:
        raise RemoteError(errors[0])


def run_on_all_ranks(action: Callable[[], Any], runs_here: bool = True) -> Any:
    """The result of `action()`, within `errors_on_all_ranks`, or None unless `runs_here`."""
    with errors_on_all_ranks():
        return action() if runs_here else None


def result_of_main_process(action: Callable[[], Any]) -> Any:
    """The result of `action()` on the main process, sent to all, who raise if it raises."""
    result = run_on_all_ranks(action, PartialState().is_main_process)
    return broadcast_object_list([result])[0]
