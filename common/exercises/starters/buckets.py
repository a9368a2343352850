"""Send gradients in buckets.

A message costs a latency, however small it is. DDP packs the gradients of several parameters into one message. Write

    fill_buckets(parameters, capacity) -> list of lists of parameters
    average_bucket(bucket) -> None

`fill_buckets` gets the parameters in the order of `model.parameters()`. It goes from the last to the first, which is
about the order in which backward computes their gradients. It closes a bucket when the parameters in it have
`capacity` bytes or more; `parameter.nbytes` says how many a parameter has. If parameters are left at the end, they
are the last bucket.

`average_bucket` replaces the gradient of each parameter in a bucket by its mean over the ranks, by a single all-reduce
of one flat tensor. `torch.cat`, `Tensor.flatten` and `Tensor.view_as` help. Both functions leave the list that they
get as it is.

    python -m common.ladder check buckets my_buckets.py
"""

import torch
import torch.distributed as dist
from torch.nn import Parameter


def fill_buckets(parameters: list[Parameter], capacity: int) -> list[list[Parameter]]:
    """The parameters in buckets of at least `capacity` bytes, the last parameter first."""
    raise NotImplementedError("put the parameters into buckets")


def average_bucket(bucket: list[Parameter]) -> None:
    """Average the gradients of the bucket's parameters over the ranks, in one message."""
    raise NotImplementedError("pack the gradients, send them, and put the means back")
