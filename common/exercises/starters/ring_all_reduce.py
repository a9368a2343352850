"""Build an all-reduce from sends and receives.

Every rank has a tensor of the same size. Write

    ring_all_reduce(tensor) -> None

After it, `tensor` holds the sums over the ranks, on all ranks. Use `send`, `recv`, `isend` and `irecv` of
`torch.distributed` only. The ranks form a ring: each sends to its right neighbour, (rank + 1) % world size, and
receives from its left one. With W ranks the tensor is cut into W chunks, and one chunk travels in each step:

    W - 1 steps: send a chunk, receive another one, and add it to your chunk of the same number (reduce-scatter);
    W - 1 steps: send a finished chunk, receive another one, and put it in place of your chunk of the same number
    (all-gather).

The first step sends the chunk whose number is the rank's. Every later step, in both halves, sends the chunk that
arrived in the step before. So each rank sends 2 (W - 1) / W of the tensor, however many ranks there are. Chunks differ
by one number in size where W does not divide the tensor. `send` returns when the other rank receives; `isend` returns a
handle at once, whose `wait()` returns when the chunk is gone. Every handle has to be waited for. `recv(tensor, source)`
writes what arrives into a `tensor` of the same size and dtype that you bring.

    python -m common.ladder check ring_all_reduce my_ring_all_reduce.py
"""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by the sum over the ranks."""
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    chunks = list(tensor.tensor_split(world_size))  # views: what is written into a chunk is written into the tensor
    raise NotImplementedError("send the chunks around the ring twice")
