"""Step 2: average each gradient in the background, while backward computes the next one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from common.small.ddp.replicas import broadcast_from_rank_0, check_has_trainable_parameters


class OverlappedDDP(nn.Module):
    """A replica whose gradients, when backward has ended, are the means over the ranks.

    Backward goes from the last layer to the first. When it has a parameter's gradient, it calls that parameter's hook,
    which starts an all-reduce and returns. Backward goes on, and ends when the last all-reduce has ended.

    Every rank must produce its gradients in the same order, because the ranks' all-reduces are matched by their order:
    a parameter that one rank does not use leaves the others waiting, or is added to another one of theirs.

    Args:
        module: the network, the same on every rank of the default process group; its weights become rank 0's.

    Raises:
        RuntimeError: for a module without trainable parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        check_has_trainable_parameters(module)
        super().__init__()
        self.module = module
        self.world_size = dist.get_world_size()
        self._pending: list[dist.Work] = []
        self._synchronising = True
        broadcast_from_rank_0(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._start_all_reduce)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients stay this rank's own and add up; the next backward outside averages the sum."""
        before = self._synchronising  # False within another one
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = before

    def _start_all_reduce(self, parameter: nn.Parameter) -> None:
        if not self._synchronising:
            return
        if not self._pending:
            # autograd calls this back when the present backward has nothing left to compute.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        parameter.grad /= self.world_size
        self._pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def _wait(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending.clear()
