"""The messages of a solution, as over the slowest link there is: no collective begins before somebody waits for it.

On one machine an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this
link it never does, so that each run of a wrong solution shows the same mistake.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.mistake import Mistake
from common.process_group import COLLECTIVES

POINT_TO_POINT = ("isend", "irecv")


class Message:
    """A call of torch.distributed by a solution, and the handle that the solution gets.

    Attributes:
        name: the function's.
        sent: a copy of the argument `tensor` from the time of the call, if it has one.
        was_changed: the tensor, between the call and the begin.
    """

    def __init__(self, traffic: "Traffic", function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.name = function.__name__
        self.function = function
        self.arguments = arguments
        self.tensor = arguments.get("tensor")
        self.sent = self.tensor.detach().clone() if isinstance(self.tensor, Tensor) else None
        self.was_changed = False
        self.was_waited_for = False
        self._traffic = traffic
        self._work: dist.Work | None = None  # of a send or a receive that has begun, until somebody waits for it

    def begin(self) -> None:
        if self.sent is not None:
            is_equal = torch.allclose(self.tensor.detach(), self.sent, rtol=0, atol=0, equal_nan=True)
            self.was_changed = not is_equal
        self._work = self.function(**self.arguments)

    def wait(self, *_: Any) -> bool:
        self._traffic.events.append("wait")
        self.was_waited_for = True
        while self in self._traffic.delayed:  # ranks may wait in any order, but begin in the order of their calls
            self._traffic.delayed.pop(0).begin()
        if self._work is not None:
            self._work.wait()
            self._work = None
        return True


class Traffic:
    """The messages of a solution on one rank.

    Attributes:
        messages: in the order of the calls.
        events: the name of each function that is called, "wait" for each wait, and what a checker adds.
        delayed: the collectives that have not begun.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.events: list[str] = []
        self.delayed: list[Message] = []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message | None:
        """A collective, or a send or a receive, which begins at once: in a ring a rank sends, then receives."""
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        is_point_to_point = function.__name__ in POINT_TO_POINT
        in_background = is_point_to_point or arguments.pop("async_op", False)
        message = Message(self, function, arguments)
        self.messages.append(message)
        self.events.append(message.name)
        if is_point_to_point:
            message.begin()
        else:
            self.delayed.append(message)
        if in_background:
            return message
        message.wait()
        return None


@contextmanager
def observed() -> Iterator[Traffic]:
    """A block in which the calls of torch.distributed's functions are messages of a solution.

    Raises:
        Mistake: at its end, if a message was not waited for, or was changed on its way.
    """
    traffic = Traffic()
    with ExitStack() as patches:
        for name in (*COLLECTIVES, *POINT_TO_POINT):
            call = functools.partial(traffic.call, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
            if name in POINT_TO_POINT:
                # send and recv call these, and batch_isend_irecv compares its operations with them.
                patches.enter_context(mock.patch.object(dist.distributed_c10d, name, call))
        yield traffic
    for message in traffic.messages:
        which = f"{message.name} of rank {dist.get_rank()}"
        if not message.was_waited_for:
            raise Mistake(
                f"{which}: wait() was not called on each handle. What is sent in the background may not have gone, "
                "and what is received may not have come, before wait() returns"
            )
        if message.was_changed:
            raise Mistake(
                f"{which}: the tensor was changed while it was under way. With async_op=True the sum is there when the "
                "handle's wait() has returned, so divide after it, or before it begins"
            )
