"""Messages in the background, and whether a solution waits for each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from common.exercises.compare import shown
from common.exercises.stage import SolutionFailed
from common.process_group import COLLECTIVES


class Handle:
    """What a message in the background returns to a solution: the handle of torch, and whether it was waited for.

    It keeps torch's handle, with which the message would go: then the same happens each time that it is forgotten.
    """

    def __init__(self, call: str, work: Any) -> None:
        self.call = call
        self.work = work
        self.was_waited_for = False

    def wait(self, *timeout: Any) -> bool:
        self.was_waited_for = True
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        """Another method of torch's handle, such as `get_future`, by which one can wait too."""
        self.was_waited_for = True
        return getattr(self.work, name)


def refuse_forgotten_handles(handles: Sequence[Handle]) -> None:
    """Raise SolutionFailed if a solution has not waited for all messages."""
    forgotten = [handle.call for handle in handles if not handle.was_waited_for]
    if forgotten:
        raise SolutionFailed(
            f"rank {dist.get_rank()} has not called wait() on these handles: {shown(forgotten)}. What is sent in the"
            " background may not have gone, and what is received may not have come, before wait() returns"
        )


@contextmanager
def all_waited_for() -> Iterator[None]:
    """A block in which each handle has to be waited for that a collective with async_op=True returns.

    Raises:
        SolutionFailed: at its end, if one was not.
    """
    handles: list[Handle] = []

    def noted(name: str) -> Callable[..., Handle | None]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Handle | None:
            work = original(*args, **kwargs)
            if work is None:
                return None
            handles.append(Handle(name, work))
            return handles[-1]

        return call

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, noted(name)))
        yield
    refuse_forgotten_handles(handles)
