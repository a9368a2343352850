"""What a run asks about its processes, whether or not there is a process group."""

from typing import Any

import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def process_rank() -> int:
    """The number of this process in the whole run; 0 where it is the only one."""
    return dist.get_rank() if is_distributed() else 0


def process_count() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank_0_decides(value: Any) -> Any:
    """The `value` of rank 0, on every rank. A collective: all processes must call it."""
    if not is_distributed():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_from_all_ranks(value: Any) -> list:
    """The value of every rank, in the order of the ranks. A collective: all processes must call it."""
    if not is_distributed():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
