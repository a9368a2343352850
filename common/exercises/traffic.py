"""The messages of a solution, as over the slowest link there is: nothing arrives before somebody waits for it.

On one machine an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this
link it never does, so that each run of a wrong solution shows the same mistake. Only isend and irecv begin at once,
because a rank of a ring receives before it waits for what it has sent.
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

from common.exercises.mistake import Mistake, SolutionFailed
from common.process_group import COLLECTIVES

POINT_TO_POINT = ("isend", "irecv")


class Message:
    """A collective, a send or a receive of a solution, and the handle that the solution gets.

    Args:
        arguments: those of the call, by name.
        arrive: lets it arrive.

    Attributes:
        tensor: the one that is sent, if it is one; `sent` is a copy from its start.
        began, waits: the traffic's `moment` when it began, and of each wait.
        was_changed: the tensor was changed between its start and its arrival.
    """

    def __init__(self, traffic: "Traffic", name: str, arguments: dict[str, Any], arrive: Callable[[], Any]) -> None:
        self.traffic = traffic
        self.name = name
        self.arguments = arguments
        self.arrive = arrive
        self.tensor = arguments.get("tensor")
        self.sent: Tensor | None = None
        if isinstance(self.tensor, Tensor):
            self.sent = self.tensor.detach().clone()
        self.began = traffic.moment
        self.waits: list[Any] = []
        self.was_changed = False

    def wait(self, *_: Any) -> bool:
        if not self.waits:
            self.traffic.deliver(self)
        self.waits.append(self.traffic.moment)
        return True


class Traffic:
    """The messages of a solution on one rank, in the order in which they began.

    Attributes:
        moment: what the checker wants to know about the time of a message; it sets it while the solution runs.
        note: called with each message when it begins.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.under_way: list[Message] = []  # collectives that have not arrived
        self.moment: Any = None
        self.note: Callable[[Message], None] = lambda message: None

    def begin(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Message | None:
        """A call of the solution, with its arguments."""
        name = original.__name__
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        if arguments.get("tensor", self) is None:
            raise TypeError(f"{name} got None for a tensor: a parameter without a gradient has to be passed over")
        in_background = arguments.pop("async_op", False)
        message = Message(self, name, arguments, arrive=functools.partial(original, **arguments))
        self.messages.append(message)
        self.note(message)
        if name in POINT_TO_POINT:
            message.arrive = original(**arguments).wait
            return message
        self.under_way.append(message)
        if in_background:
            return message
        message.wait()
        return None

    def deliver(self, message: Message) -> None:
        """Let a message arrive, and before it the collectives that began earlier: ranks may wait in any order."""
        if message.name in POINT_TO_POINT:
            message.arrive()
        while message in self.under_way:
            earliest = self.under_way.pop(0)
            if earliest.sent is not None:
                earliest.was_changed = not torch.equal(earliest.tensor.detach(), earliest.sent)
            earliest.arrive()


@contextmanager
def observed() -> Iterator[Traffic]:
    """A block in which the calls of torch.distributed's functions are messages of a solution.

    Raises:
        SolutionFailed: at its end, if a message was not waited for, or was changed on its way.
    """
    traffic = Traffic()
    with ExitStack() as patches:
        for name in COLLECTIVES + POINT_TO_POINT:
            call = functools.partial(traffic.begin, getattr(dist, name))
            patches.enter_context(mock.patch.object(dist, name, call))
            if name in POINT_TO_POINT:
                # These are what send and recv call, and batch_isend_irecv compares its operations with them.
                patches.enter_context(mock.patch.object(dist.distributed_c10d, name, call))
        yield traffic
    forgotten = [message.name for message in traffic.messages if not message.waits]
    if forgotten:
        raise SolutionFailed(Mistake("not waited for").at(f"rank {dist.get_rank()}, {', '.join(forgotten)}"))
    changed = [message.name for message in traffic.messages if message.was_changed]
    if changed:
        raise SolutionFailed(Mistake("changed on its way").at(f"rank {dist.get_rank()}, {', '.join(changed)}"))
