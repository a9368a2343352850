"""A simulated network, the slowest there is: each collective of a solution begins when somebody waits for it.

Only sends and receives begin at once, because in a ring a rank sends before it receives. On one machine an all-reduce
in the background ends so soon that code which forgets to wait mostly works. Over this link it never does, so that each
run of a wrong solution shows the same mistake.
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

from common.exercises.compare import Mistake
from common.process_group import COLLECTIVES

POINT_TO_POINT = ("isend", "irecv")


class Message:
    """A call of torch.distributed by a solution, which gets it as its handle."""

    def __init__(self, traffic: "Traffic", function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        tensor = arguments.get("tensor")
        self.name = function.__name__
        self.arguments = arguments
        self.sent = tensor.detach().clone() if isinstance(tensor, Tensor) else None  # as it was when it was called
        self.was_changed = False  # the tensor changed between the call and the begin
        self.was_waited_for = False
        self._traffic = traffic
        self._function = function
        # The work of a send or a receive that has begun, until somebody waits for it.
        self._work: dist.Work | None = None

    def begin(self) -> None:
        if self.sent is not None:
            now = self.arguments["tensor"].detach()
            self.was_changed = not torch.allclose(now, self.sent, rtol=0, atol=0, equal_nan=True)
        self._work = self._function(**self.arguments)

    def wait(self, *_: Any) -> bool:
        self.was_waited_for = True
        self._traffic.events.append("wait")
        self._traffic.begin_up_to(self)
        if self._work is not None:
            self._work.wait()
            self._work = None
        return True

    def is_completed(self) -> bool:
        """True once somebody has waited: a collective does not begin before."""
        return self.was_waited_for


class Traffic:
    """The messages and the events of a solution on one rank.

    A collective stays in `delayed` until somebody waits for it. Then it begins, after all that were called before it:
    ranks may wait in any order, but their collectives begin in the order of the calls.

    An event is the name of a called function, "wait" for a wait, or a text that a checker adds, such as "backward".
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []  # in the order of the calls
        self.events: list[str] = []
        self.delayed: list[Message] = []  # the collectives that have not begun

    def call_collective(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message | None:
        message = self._message(function, args, kwargs)
        self.delayed.append(message)
        if message.arguments.pop("async_op", False):
            return message
        message.wait()
        return None

    def send_or_receive(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message:
        """A message that begins at once."""
        message = self._message(function, args, kwargs)
        message.begin()
        return message

    def begin_up_to(self, message: Message) -> None:
        """Begin the delayed collectives up to this one; a message that is not delayed has begun already."""
        while message in self.delayed:
            self.delayed.pop(0).begin()

    def check_all_waited(self) -> None:
        """Raise a Mistake if a message was not waited for, or was changed on its way."""
        for message in self.messages:
            which = f"{message.name} of rank {dist.get_rank()}"
            if not message.was_waited_for:
                raise Mistake(
                    f"{which}: wait() was not called on its handle. Before wait() returns, the numbers may not have "
                    "arrived"
                )
            if message.was_changed:
                raise Mistake(
                    f"{which}: the tensor was changed while it was under way. The sum is there when the handle's "
                    "wait() has returned: divide after it"
                )

    def _message(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Message:
        message = Message(self, function, inspect.signature(function).bind(*args, **kwargs).arguments)
        self.messages.append(message)
        self.events.append(message.name)
        return message


@contextmanager
def simulated_network() -> Iterator[Traffic]:
    """A block in which the calls of torch.distributed's functions are messages."""
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
