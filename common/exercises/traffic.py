"""The messages of a solution, as over the slowest link there is: no collective begins before somebody waits for it.

On one machine an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this
link it never does, so that each run of a wrong solution shows the same mistake.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.mistake import Mistake, SolutionFailed
from common.process_group import COLLECTIVES

POINT_TO_POINT = ("isend", "irecv")


class Moment(NamedTuple):
    """A time of the training."""

    step: int = 0  # from 1 on; 0 before the first one
    gradients_left: int = 0  # that the present backward has still to compute


class Message:
    """A call of torch.distributed by a solution, and the handle that the solution gets."""

    def __init__(self, traffic: "Traffic", function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.traffic = traffic
        self.function = function
        self.name = function.__name__
        self.arguments = arguments
        self.tensor = arguments.get("tensor")
        self.sent: Tensor | None = None  # a copy of the tensor from the time of the call
        if isinstance(self.tensor, Tensor):
            self.sent = self.tensor.detach().clone()
        self.called = traffic.moment
        self.waits: list[Moment] = []  # one for each wait
        self.was_changed = False  # the tensor, between the call and the first wait

    def wait(self, *_: Any) -> bool:
        if not self.waits:
            self.arrive()
        self.waits.append(self.traffic.moment)
        return True

    def arrive(self) -> None:
        raise NotImplementedError


class PointToPoint(Message):
    """A send or a receive. It begins at once: a rank of a ring receives before it waits for what it has sent."""

    def begin(self) -> None:
        self.work = self.function(**self.arguments)

    def arrive(self) -> None:
        self.work.wait()


class Collective(Message):
    """A collective. It begins when the solution waits for it, or for a later one: ranks may wait in any order."""

    def begin(self) -> None:
        if self.sent is not None:
            is_equal = torch.allclose(self.tensor.detach(), self.sent, rtol=0, atol=0, equal_nan=True)
            self.was_changed = not is_equal
        self.function(**self.arguments)

    def arrive(self) -> None:
        while self in self.traffic.not_begun:
            earliest = self.traffic.not_begun.pop(0)
            earliest.begin()


class Traffic:
    """The messages of a solution on one rank, in the order of its calls."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.not_begun: list[Collective] = []
        self.moment = Moment()  # now; a checker that compares times sets it while the solution runs
        self.note: Callable[[Message], None] = lambda message: None  # called with each message before it begins

    def call_collective(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message | None:
        arguments = _by_name(function, args, kwargs)
        in_background = arguments.pop("async_op", False)
        message = Collective(self, function, arguments)
        self.messages.append(message)
        self.note(message)
        self.not_begun.append(message)
        if in_background:
            return message
        message.wait()
        return None

    def call_point_to_point(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Message:
        message = PointToPoint(self, function, _by_name(function, args, kwargs))
        self.messages.append(message)
        self.note(message)
        message.begin()
        return message


def _by_name(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    if "tensor" in arguments and arguments["tensor"] is None:
        raise TypeError(f"{function.__name__} got None for a tensor: pass over parameters without a gradient")
    return arguments


@contextmanager
def observed() -> Iterator[Traffic]:
    """A block in which the calls of torch.distributed's functions are messages of a solution.

    Raises:
        SolutionFailed: at its end, if a message was not waited for, or was changed on its way.
    """
    traffic = Traffic()
    with ExitStack() as patches:
        for name in COLLECTIVES:
            call = functools.partial(traffic.call_collective, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
        for name in POINT_TO_POINT:
            call = functools.partial(traffic.call_point_to_point, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
            # These are what send and recv call, and batch_isend_irecv compares its operations with them.
            patches.enter_context(mock.patch.object(dist.distributed_c10d, name, call))
        yield traffic
    not_waited_for = [message.name for message in traffic.messages if not message.waits]
    if not_waited_for:
        raise SolutionFailed(Mistake("not waited for").at(f"rank {dist.get_rank()}, {', '.join(not_waited_for)}"))
    changed = [message.name for message in traffic.messages if message.was_changed]
    if changed:
        raise SolutionFailed(Mistake("changed on its way").at(f"rank {dist.get_rank()}, {', '.join(changed)}"))
