"""The default process group: which ranks it has, a block in which it exists, and how it is left."""

import atexit
import contextlib
import gc
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# The functions of torch.distributed.nn.functional take the default group of the moment when it is imported as their
# default argument. If it is imported later (the first DDP or optimizer does it), they keep a group and its threads for
# ever. A thread that outlives the interpreter aborts the process:
# https://github.com/pytorch/pytorch/issues/190489
import torch.distributed.nn.functional

# The functions of torch.distributed that all ranks of a group call together, to exchange data.
_COLLECTIVES_OF_ALL_RELEASES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
COLLECTIVES = tuple(name for name in _COLLECTIVES_OF_ALL_RELEASES if hasattr(dist, name))

# The methods below `torch` that empty caches of DTensor, from torch 2.14 on: they hold FSDP's mesh, and so its group.
_EMPTY_CACHES_OF_MESHES = (
    "distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
    "distributed.tensor._redistribute._gen_transform_infos.cache_clear",
    "distributed.tensor._redistribute._planner_cache.clear",
    "_C._clear_DTensor_sharding_propagator_cache",
)
_left_group: Any = None  # `leave_process_group` keeps the group here.


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """The number of this process in the whole run; 0 where it is the only one."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """The number of processes of the run; 1 where there is no group."""
    return dist.get_world_size() if is_distributed() else 1


def all_gather_object(value: Any) -> list:
    """The value of every rank, in the order of the ranks. A collective: all processes must call it."""
    if not is_distributed():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def process_group(backend: str = "gloo", **options: Any) -> Iterator[None]:
    """A process group of all ranks for the block; `options` go to `init_process_group`.

    After an error in the block:

    - nccl: the group is aborted. To destroy it would wait for the other ranks, which wait in a collective for this one.
    - gloo: the group stays. To destroy it would close the connections, and the other ranks would raise too, perhaps
      before torchrun has got this rank's traceback.
    - a single process: the group is destroyed, so that a notebook can make another one.
    """
    dist.init_process_group(backend, **options)
    try:
        yield
    except BaseException:
        if get_world_size() == 1:
            leave_process_group()
        elif dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        raise
    leave_process_group()


def leave_process_group() -> None:
    """Destroy the process group of this rank, if there is one, and keep a reference to it.

    Dropping the last reference to a group waits for the group's threads. Two holders must not be the last:

    - A model in DistributedDataParallel waits while it holds the GIL. With torch 2.11 it waits for ever if one of the
      threads wants the GIL.
    - A communication hook in Python runs on one of the threads, which would wait for itself. The process ends with
      "Resource deadlock avoided".

    So the reference is kept here until the next group is left, or until `free_left_group` drops it.
    """
    global _left_group
    if is_distributed():
        _left_group = dist.group.WORLD
        dist.destroy_process_group()


@atexit.register  # a thread that wants the GIL of an interpreter that has ended aborts the process
def free_left_group() -> None:
    """Drop the group that this process has left, and wait for its threads.

    A process that is to fork does this first: its child has the group, but not the threads, and would wait for ever.
    """
    global _left_group
    _left_group = None
    if "torch.distributed.tensor" in sys.modules:
        for name in _EMPTY_CACHES_OF_MESHES:
            with contextlib.suppress(AttributeError):
                operator.attrgetter(name)(torch)()
        gc.collect()  # A mesh is part of a cycle.
