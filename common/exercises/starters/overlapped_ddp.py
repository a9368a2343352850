"""Average each gradient while backward computes the next one.

Backward goes from the last layer to the first. The last layer's gradient can travel while the earlier ones are
computed. Write the class OverlappedDDP. A training loop uses it like this:

    model = OverlappedDDP(network)
    loss_of(model(inputs)).backward()
    model.wait()
    optimizer.step()
    optimizer.zero_grad()

After `wait` the gradient of every parameter is the mean over the ranks. Each all-reduce begins during backward, as
soon as its gradient is there, and does not make backward wait: `dist.all_reduce(tensor, async_op=True)` returns a
handle at once, whose `wait()` returns when the sum has arrived. Until then, do not read, change or send the tensor
again. A hook that you register by `parameter.register_post_accumulate_grad_hook(function)` calls `function(parameter)`
when backward has written `parameter.grad`. The loop makes many steps.

    python -m common.ladder check overlapped_ddp my_overlapped_ddp.py
"""

import torch.distributed as dist
from torch import Tensor, nn


class OverlappedDDP(nn.Module):
    """A replica that averages its gradients in the background."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.handles: list[dist.Work] = []
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), src=0)  # all ranks begin with the weights of rank 0
        raise NotImplementedError("let backward call start_all_reduce for each parameter")

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def start_all_reduce(self, parameter: nn.Parameter) -> None:
        """Begin to average the gradient of `parameter`, and return at once."""
        raise NotImplementedError("begin an all-reduce of parameter.grad, and keep its handle")

    def wait(self) -> None:
        """Return when all gradients are the means over the ranks."""
        raise NotImplementedError("wait for the all-reduces of this step")
