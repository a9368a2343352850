"""Step 3: send gradients in buckets, because a message costs a latency whatever its size."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.small.ddp.replicas import broadcast_from_rank_0, check_has_trainable_parameters

MIB = 2**20


class Bucket:
    """Parameters whose gradients travel in one message.

    Attributes:
        parameters: in the order in which their gradients lie in the message.
        missing: those whose gradients this backward has not computed yet.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = set(parameters)
        self._message: Tensor | None = None
        self._work: dist.Work | None = None

    def start_all_reduce(self, world_size: int) -> None:
        """Pack the gradients into one flat tensor and send it in the background."""
        self._message = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        self._message /= world_size
        self._work = dist.all_reduce(self._message, async_op=True)

    def finish(self) -> None:
        """Wait for the means, and put each where its gradient was. The bucket is then ready for the next backward."""
        self._work.wait()
        start = 0
        for parameter in self.parameters:
            mean = self._message[start : start + parameter.numel()]
            parameter.grad.copy_(mean.view_as(parameter))
            start += parameter.numel()
        self._message = None
        self._work = None
        self.missing = set(self.parameters)


class BucketedDDP(nn.Module):
    """A replica whose gradients, when backward has ended, are the means over the ranks; they travel in buckets.

    The buckets are filled in the reverse order of the parameters, which is about the order in which backward computes
    their gradients. So the first bucket is full early, and is under way while backward fills the next one.

    Args:
        module: the network, the same on every rank of the default process group; its weights become rank 0's.
        bucket_mib: a bucket is closed when it holds at least so many MiB. One bucket for all sends nothing before
            backward ends; one per parameter is `OverlappedDDP`. torch's default is 25, after a first bucket of 1.

    Raises:
        RuntimeError: for a module without trainable parameters.
    """

    def __init__(self, module: nn.Module, bucket_mib: float = 25.0) -> None:
        check_has_trainable_parameters(module)
        super().__init__()
        self.module = module
        self.world_size = dist.get_world_size()
        self._synchronising = True
        self._backward_is_running = False
        broadcast_from_rank_0(module)
        self.buckets = fill_buckets(module, bucket_mib * MIB)
        self._bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def forward(self, *args, **kwargs):
        if self._backward_is_running:
            raise RuntimeError("the last backward has not ended: its gradients are not averaged")
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

    def _note_gradient(self, parameter: nn.Parameter) -> None:
        if not self._synchronising:
            return
        if not self._backward_is_running:
            self._backward_is_running = True
            # autograd calls this back when the present backward has nothing left to compute.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of[parameter]
        bucket.missing.discard(parameter)
        if not bucket.missing:
            bucket.start_all_reduce(self.world_size)

    def _finish(self) -> None:
        self._check_all_gradients_came()
        for bucket in self.buckets:
            bucket.finish()
        self._backward_is_running = False

    def _check_all_gradients_came(self) -> None:
        missing: set[nn.Parameter] = set()
        for bucket in self.buckets:
            missing |= bucket.missing
        if missing:
            names = [name for name, parameter in self.module.named_parameters() if parameter in missing]
            raise RuntimeError(f"these parameters got no gradient, so their buckets were not sent: {', '.join(names)}")


def fill_buckets(module: nn.Module, capacity: float) -> list[Bucket]:
    """The trainable parameters of `module` in buckets of at least `capacity` bytes, the last layer's first."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    buckets = []
    filling: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(trainable):
        filling.append(parameter)
        size += parameter.nbytes
        if size >= capacity:
            buckets.append(Bucket(filling))
            filling = []
            size = 0
    if filling:
        buckets.append(Bucket(filling))
    return buckets
