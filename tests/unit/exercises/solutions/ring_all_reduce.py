import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)
    for step in range(world_size - 1):
        handle = dist.isend(chunks[(rank - step) % world_size], right)
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        dist.recv(arrived, left)
        mine += arrived
        handle.wait()
    for step in range(world_size - 1):
        handle = dist.isend(chunks[(rank + 1 - step) % world_size], right)
        dist.recv(chunks[(rank - step) % world_size], left)
        handle.wait()
