"""All-reduces as over the slowest link there is: nothing arrives before somebody waits for it.

On one machine an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this
link it never does, so that each run of a wrong solution shows the same mistake.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHANGED_TOO_EARLY = (
    "was changed while its all-reduce was under way: with async_op=True the sum is there when the handle's wait() has"
    " returned, so divide after it"
)


class Message:
    """An all-reduce of a solution: the handle that the solution gets, and what the checker wants to know of it."""

    def __init__(self, link: "SlowLink", tensor: Tensor, arguments: dict[str, Any], in_background: bool) -> None:
        self.link = link
        self.tensor = tensor.detach()
        self.sent = self.tensor.clone()
        self.arguments = arguments
        self.in_background = in_background
        self.step = link.step
        self.gradients_left = link.gradients_left
        self.gradients = same_memory(tensor, [parameter.grad for parameter in link.parameters])
        self.weights = same_memory(tensor, link.parameters)
        self.times_waited = 0
        self.first_step_waited = 0  # 0: in none
        self.last_step_waited = 0
        self.held_up_backward = False
        self.was_changed = False  # between its start and its arrival

    def wait(self) -> bool:
        if not self.times_waited:
            self.was_changed = not torch.equal(self.tensor, self.sent)
            self.held_up_backward = self.link.gradients_left > 0
            self.first_step_waited = self.link.step
            _all_reduce(self.tensor, **self.arguments)
        self.times_waited += 1
        self.last_step_waited = self.link.step
        return True

    def get_future(self) -> "Arrival":
        return Arrival(self, lambda: [self.tensor])


class Arrival:
    """The future of a message. Over this link the functions that follow it run when somebody waits for it."""

    def __init__(self, message: Message, result: Callable[[], Any]) -> None:
        self.message = message
        self.value = functools.cache(result)

    def then(self, function: Callable[["Arrival"], Any]) -> "Arrival":
        return Arrival(self.message, lambda: function(self))

    def wait(self) -> Any:
        self.message.wait()
        return self.value()


def same_memory(tensor: Tensor, others: Sequence[Tensor | None]) -> list[int]:
    """The numbers of those that begin where `tensor` does."""
    begin = tensor.data_ptr()
    return [number for number, other in enumerate(others) if other is not None and other.data_ptr() == begin]


class SlowLink:
    """The messages of a solution, in the order in which they began.

    Attributes:
        parameters: those of the network that is trained, so that a message knows whose gradient it carries.
        step: the number of the present step, from 1 on.
        gradients_left: how many gradients the present backward has still to compute.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.parameters: list[nn.Parameter] = []
        self.step = 0
        self.gradients_left = 0

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Message | None:
        if tensor is None:
            raise TypeError("all_reduce got None for a tensor: a parameter without a gradient has to be passed over")
        if not isinstance(tensor, Tensor):
            _all_reduce(tensor)  # which raises torch's own error
        message = Message(self, tensor, {"op": op, "group": group}, async_op)
        self.messages.append(message)
        if async_op:
            return message
        message.wait()
        return None


_all_reduce = dist.all_reduce


@contextmanager
def slow_link() -> Iterator[SlowLink]:
    """A block in which all that call `dist.all_reduce` from Python use the slow link; torch's own DDP does not."""
    link = SlowLink()
    with (
        mock.patch.object(dist, "all_reduce", link.all_reduce),
        # For `from torch.distributed.distributed_c10d import all_reduce`, and for functional collectives.
        mock.patch.object(dist.distributed_c10d, "all_reduce", link.all_reduce),
    ):
        yield link
