"""Accumulate gradients over micro-batches, and send them once.

You have a model in DistributedDataParallel, an optimizer, and a list of micro-batches of equal size, each a pair of
inputs and targets. Write

    train_step(model, optimizer, micro_batches) -> None

It makes one optimizer step with the mean gradient over all samples of all micro-batches and ranks. The loss of a
micro-batch is `F.mse_loss(model(inputs), targets)`. One micro-batch at a time goes forward and backward through the
network. The ranks send their gradients once in a step, however many micro-batches there are: in the context
`model.no_sync()` DDP sends none, and they add up on each rank. Clear the gradients once in a step.

    python -m common.ladder check accumulate my_accumulate.py
"""

import contextlib

import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def train_step(
    model: DistributedDataParallel, optimizer: Optimizer, micro_batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Make one step with the mean gradient of all micro-batches."""
    raise NotImplementedError("accumulate the gradients of the micro-batches, then make a step")
