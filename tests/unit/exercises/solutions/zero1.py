from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ZeRO1:
    def __init__(self, module: nn.Module, **settings: Any) -> None:
        self.parameters = list(module.parameters())
        own = self.parameters[dist.get_rank() :: dist.get_world_size()]
        self.optimizer = torch.optim.AdamW(own, **settings)

    def step(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        for number, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.detach(), src=number % dist.get_world_size())

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
