"""Average the gradients by hand.

Every rank has a network with the same weights, and has called backward on a loss of its own samples. Write

    average_gradients(model) -> None

After the call the gradient of every parameter is the mean of the ranks' gradients, on all ranks: then equal weights
make equal steps, and stay equal. A process group exists, so you can call the collectives of `torch.distributed`:
`dist.all_reduce(tensor)` puts the sum of the ranks' tensors into `tensor` itself and returns None, and
`dist.get_world_size()` is the number of ranks.
A parameter that took no part in the loss has None as its gradient; it stays None.

    python -m common.ladder check average_gradients my_average_gradients.py
"""

import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient of `model` by its mean over the ranks."""
    raise NotImplementedError("average parameter.grad for each parameter in model.parameters()")
