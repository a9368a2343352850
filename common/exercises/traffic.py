"""A simulated network, the slowest there is: each collective of a solution begins when somebody waits for it.

Sends and receives begin at once, because in a ring a rank sends before it receives. So does a barrier. On one machine
an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this link it never does,
so that each run of a wrong solution shows the same mistake.
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

from common.exercises.compare import Mistake
from common.process_group import COLLECTIVES

POINT_TO_POINT = ("isend", "irecv")


@dataclass(eq=False)
class Message:
    """A call of a function of torch.distributed by a solution."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    sent: Tensor | None  # the tensor as it was at the call
    was_changed: bool = False  # True if a delayed collective began with other numbers than those of the call
    was_waited_for: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    def has_new_numbers(self) -> bool:
        """True if the tensor no longer is as it was at the call."""
        if self.sent is None:
            return False
        now = self.arguments["tensor"].detach()
        return not torch.allclose(now, self.sent, rtol=0, atol=0, equal_nan=True)


@dataclass(eq=False)  # as torch's handle, it can be in a set
class Handle:
    """The handle of a message, which a solution gets in place of torch's."""

    message: Message
    events: list[str]
    finish: Callable[[], Any]  # a collective begins here; a send or receive has begun, and is waited for

    def wait(self, *_: Any) -> bool:
        self.events.append("wait")
        if not self.message.was_waited_for:
            self.message.was_waited_for = True
            self.finish()
        return True

    def is_completed(self) -> bool:
        """True once somebody has waited: a collective does not begin before."""
        return self.message.was_waited_for


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

    def call_collective(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle | None:
        message = self._new_message(function, args, kwargs)
        is_async = message.arguments.pop("async_op", False)
        self.delayed.append(message)
        handle = Handle(message, self.events, functools.partial(self.begin_up_to, message))
        if is_async:
            return handle
        handle.wait()
        return None

    def send_or_receive(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle | None:
        """The handle of a message that begins at once; None, as torch's, where this rank is not in the group."""
        message = self._new_message(function, args, kwargs)
        work = function(**message.arguments)
        if work is None:
            message.was_waited_for = True  # nothing was sent
            return None
        return Handle(message, self.events, work.wait)

    def begin_up_to(self, message: Message) -> None:
        """Begin the delayed collectives up to this one; a message that is not delayed has begun already."""
        while message in self.delayed:
            collective = self.delayed.pop(0)
            collective.was_changed = collective.has_new_numbers()
            collective.function(**collective.arguments)

    def check_all_waited(self) -> None:
        """Raise a Mistake if a message was not waited for, or was changed on its way."""
        for message in self.messages:
            which = f"{message.name} of rank {dist.get_rank()}"
            if not message.was_waited_for:
                sentence = "wait() was not called on its handle. Before it returns, the numbers may not be there"
                raise Mistake(f"{which}: {sentence}")
            if message.was_changed:
                sentence = "the tensor was changed while it was under way. wait() returns with the sum: divide after it"
                raise Mistake(f"{which}: {sentence}")

    def _new_message(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Message:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        tensor = arguments.get("tensor")
        sent = tensor.detach().clone() if isinstance(tensor, Tensor) else None
        message = Message(function, arguments, sent)
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
