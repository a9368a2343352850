"""A simulated network, the slowest there is: each collective of a solution begins when somebody waits for it.

Sends and receives begin at once, because in a ring a rank sends before it receives. So does a barrier. On one machine
an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this link it never does,
so that each run of a wrong solution shows the same mistake.
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
    """A call of torch.distributed by a solution, and the handle that the solution gets in place of torch's."""

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict, finish: Callable) -> None:
        self.name = function.__name__
        self.arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        self.is_async = self.arguments.pop("async_op", False)
        tensor = self.arguments.get("tensor")
        self.sent = tensor.detach().clone() if isinstance(tensor, Tensor) else None  # the tensor as it was at the call
        self.was_changed = False  # True if a collective began with other numbers than those of the call
        self.was_waited_for = False
        self.work: dist.Work | None = None  # torch's own handle of a send or receive
        self._function = function
        self._finish = finish  # called with this message by each wait

    def begin(self) -> None:
        if self.sent is not None:
            now = self.arguments["tensor"].detach()
            self.was_changed = not torch.allclose(now, self.sent, rtol=0, atol=0, equal_nan=True)
        self.work = self._function(**self.arguments)

    def wait(self, *_: Any) -> bool:
        self._finish(self)
        return True

    def is_completed(self) -> bool:
        """True once somebody has waited: a collective does not begin before."""
        return self.was_waited_for

    def get_future(self) -> None:
        raise Mistake("wait for the handle itself, by its wait(): here it has no future")


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
        message = self._new_message(function, args, kwargs)
        self.delayed.append(message)
        if message.is_async:
            return message
        message.wait()
        return None

    def send_or_receive(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message | None:
        """A message that begins at once; None, as torch's, where this rank is not in the group."""
        message = self._new_message(function, args, kwargs)
        message.begin()
        if message.work is None:
            message.was_waited_for = True  # nothing was sent
            return None
        return message

    def check_all_waited(self) -> None:
        """Raise a Mistake if a message was not waited for, or was changed on its way."""
        for message in self.messages:
            if not message.was_waited_for:
                sentence = "wait() was not called on its handle. Before it returns, the numbers may not be there"
            elif message.was_changed:
                sentence = "the tensor was changed while it was under way. wait() returns with the sum: divide after it"
            else:
                continue
            raise Mistake(f"{message.name} of rank {dist.get_rank()}: {sentence}")

    def _new_message(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Message:
        message = Message(function, args, kwargs, self._finish)
        self.messages.append(message)
        self.events.append(message.name)
        return message

    def _finish(self, message: Message) -> None:
        """Wait for a send or receive, or begin the delayed collectives up to this one."""
        self.events.append("wait")
        if not message.was_waited_for and message.work is not None:
            message.work.wait()
        message.was_waited_for = True
        while message in self.delayed:
            self.delayed.pop(0).begin()


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
