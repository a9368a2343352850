import contextlib

import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def train_step(
    model: DistributedDataParallel, optimizer: Optimizer, micro_batches: list[tuple[Tensor, Tensor]]
) -> None:
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.mse_loss(model(inputs), targets)
            (loss / len(micro_batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
