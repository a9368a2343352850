import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    def __init__(self, scale: float, growth_interval: int) -> None:
        self.factor = scale
        self.growth_interval = growth_interval
        self.steps_in_a_row = 0
        self.was_skipped = False

    def get_scale(self) -> float:
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def step(self, optimizer: Optimizer) -> None:
        overflows = torch.zeros(())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.factor
                overflows += not parameter.grad.isfinite().all()
        dist.all_reduce(overflows)
        self.was_skipped = overflows.item() > 0
        if not self.was_skipped:
            optimizer.step()

    def update(self) -> None:
        self.steps_in_a_row += 1
        if self.was_skipped:
            self.factor /= 2
            self.steps_in_a_row = 0
        elif self.steps_in_a_row == self.growth_interval:
            self.factor *= 2
            self.steps_in_a_row = 0
