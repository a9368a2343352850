"""An all-reduce by a ring: each rank sends to its right neighbour only, and hears from its left one only.

    rank 0  →  rank 1  →  rank 2  →  rank 3  →  rank 0

Each of W ranks cuts its tensor into W parts. In the first half, the reduce-scatter, a part travels once around the ring
and every rank adds its own numbers to it. After W - 1 messages each rank has one part that is summed over all ranks. In
the second half, the all-gather, the sums travel around in the same way, and nobody adds anything. A rank sends W - 1 of
W parts in each half: twice the tensor for many ranks, and never more.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A message of each rank to its right neighbour.

    Attributes:
        half: "reduce-scatter" or "all-gather".
        sent: the number of the part that this rank has sent.
        received: the number of the part that has come from the left neighbour.
    """

    half: str
    sent: int
    received: int


def ring_all_reduce(tensor: Tensor) -> None:
    """Replace the tensor by its sum over the ranks, in place. A collective; the tensor must be contiguous."""
    for _ in ring_messages(tensor):
        pass


def ring_messages(tensor: Tensor) -> Iterator[Message]:
    """The same, one message after the other, for somebody who wants to look at the tensor in between."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    parts = tensor.view(-1).tensor_split(world_size)  # as equal as possible, and views of the tensor

    for step in range(world_size - 1):
        sent = (rank - step) % world_size
        received = (rank - step - 1) % world_size
        parts[received].add_(_exchange(parts[sent], parts[received]))
        yield Message("reduce-scatter", sent, received)

    # Now part rank + 1 is summed over all ranks.
    for step in range(world_size - 1):
        sent = (rank - step + 1) % world_size
        received = (rank - step) % world_size
        parts[received].copy_(_exchange(parts[sent], parts[received]))
        yield Message("all-gather", sent, received)


def _exchange(outgoing: Tensor, like: Tensor) -> Tensor:
    """Send a part to the right and receive one, of the shape of `like`, from the left, both at once."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    incoming = torch.empty_like(like)
    # If all sent first and received afterwards, each would wait for a neighbour that waits as well.
    sending = dist.isend(outgoing, (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    sending.wait()
    return incoming
