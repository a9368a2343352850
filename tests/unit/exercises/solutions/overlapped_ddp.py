import torch.distributed as dist
from torch import Tensor, nn


class OverlappedDDP(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.handles: list[dist.Work] = []
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), src=0)
            parameter.register_post_accumulate_grad_hook(self.start_all_reduce)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def start_all_reduce(self, parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()
