"""All-reduces as over the slowest link there is: nothing arrives before somebody waits for it.

On one machine an all-reduce in the background ends so soon that code which forgets to wait mostly works. Over this
link it never does, so that each run of a wrong solution shows the same mistake.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class Message:
    """An all-reduce of a solution: the handle that the solution gets, and what the checker wants to know of it."""

    def __init__(self, tensor: Tensor, arguments: dict[str, Any], in_background: bool, gradients_left: int) -> None:
        self.tensor = tensor
        self.sent = tensor.clone()
        self.arguments = arguments
        self.in_background = in_background
        self.gradients_left = gradients_left
        self.times_waited = 0
        self.was_changed = False  # between its start and its arrival

    def wait(self) -> bool:
        if not self.times_waited:
            self.was_changed = not torch.equal(self.tensor, self.sent)
            _all_reduce(self.tensor, **self.arguments)
        self.times_waited += 1
        return True


class SlowLink:
    """The messages of a solution, in the order in which they began.

    Attributes:
        gradients_left: how many gradients the present backward has still to compute.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.gradients_left = 0

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Message | None:
        if tensor is None:
            raise TypeError("all_reduce got None for a tensor: a parameter without a gradient has to be passed over")
        message = Message(tensor, {"op": op, "group": group}, async_op, self.gradients_left)
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
