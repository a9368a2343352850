"""A simulated network, the slowest there is: each collective of a solution begins when somebody waits for it.

On one machine an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this
link it never does, so that each run of a wrong solution shows the same mistake.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.mistake import Mistake
from common.process_group import COLLECTIVES

POINT_TO_POINT = ("isend", "irecv")


@dataclass(eq=False)
class Message:
    """A call of torch.distributed by a solution; the solution gets it as its handle."""

    name: str  # of the function
    arguments: dict[str, Any]
    function: Callable[..., Any]
    wait_for: Callable[["Message"], None]  # of the Traffic
    sent: Tensor | None  # a copy of the argument `tensor` from the time of the call
    was_changed: bool = False  # the tensor, between the call and the begin
    was_waited_for: bool = False
    work: dist.Work | None = None  # of a send or a receive that has begun, until somebody waits for it

    def wait(self, *_: Any) -> bool:
        self.wait_for(self)
        return True


class Traffic:
    """The messages of a solution on one rank.

    A collective stays in `delayed` until somebody waits for it. Then it begins, after all that were called before it:
    ranks may wait in any order, but their collectives begin in the order of the calls.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []  # in the order of the calls
        self.events: list[str] = []  # the name of each function called, "wait" for each wait, what a checker adds
        self.delayed: list[Message] = []  # the collectives that have not begun

    def call_collective(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message | None:
        message = self._message(function, args, kwargs)
        self.delayed.append(message)
        if message.arguments.pop("async_op", False):
            return message
        self.wait_for(message)
        return None

    def send_or_receive(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message:
        """A message that begins at once, because in a ring a rank sends and then receives."""
        message = self._message(function, args, kwargs)
        self._begin(message)
        return message

    def wait_for(self, message: Message) -> None:
        self.events.append("wait")
        message.was_waited_for = True
        while message in self.delayed:
            self._begin(self.delayed.pop(0))
        if message.work is not None:
            message.work.wait()
            message.work = None

    def _message(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Message:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        tensor = arguments.get("tensor")
        sent = tensor.detach().clone() if isinstance(tensor, Tensor) else None
        message = Message(function.__name__, arguments, function, self.wait_for, sent)
        self.messages.append(message)
        self.events.append(message.name)
        return message

    def _begin(self, message: Message) -> None:
        if message.sent is not None:
            now = message.arguments["tensor"].detach()
            message.was_changed = not torch.allclose(now, message.sent, rtol=0, atol=0, equal_nan=True)
        message.work = message.function(**message.arguments)


@contextmanager
def observed() -> Iterator[Traffic]:
    """A block in which the calls of torch.distributed's functions are messages of a solution.

    Raises:
        Mistake: at its end, if a message was not waited for, or was changed on its way.
    """
    traffic = Traffic()
    with ExitStack() as patches:
        for name in COLLECTIVES:
            call = functools.partial(traffic.call_collective, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
        for name in POINT_TO_POINT:
            call = functools.partial(traffic.send_or_receive, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
            # send and recv call these, and batch_isend_irecv compares its operations with them.
            patches.enter_context(mock.patch.object(dist.distributed_c10d, name, call))
        yield traffic
    for message in traffic.messages:
        which = f"{message.name} of rank {dist.get_rank()}"
        if not message.was_waited_for:
            raise Mistake(
                f"{which}: wait() was not called on its handle. Before wait() returns, the numbers may not have arrived"
            )
        if message.was_changed:
            raise Mistake(
                f"{which}: the tensor was changed while it was under way. The sum is there when the handle's wait() "
                "has returned: divide after it"
            )
