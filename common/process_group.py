"""The processes of a run as torch.distributed sees them, whether or not there is a process group."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

# Its functions take the group of the moment of this import as their default. Imported later (the first optimizer does
# it) they keep that group and its threads for ever, and a thread that outlives the interpreter aborts the process:
# https://github.com/pytorch/pytorch/issues/190489
import torch.distributed.nn.functional  # noqa: F401

PR_SET_PDEATHSIG = 1  # in Linux's prctl.h
# The functions of torch.distributed that all ranks of a group call together, to exchange data.
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
_left_group: Any = None  # which `leave_process_group` keeps
# This process when it has imported this module. A fork of it has another number, and it for a parent.
_PROCESS = os.getpid()
_PARENT = os.getppid()


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


def end_with_launcher() -> None:
    """Let this rank get SIGTERM when torchrun ends, on Linux, however that ends.

    torchrun ends its ranks when it is told to end. Killed, for want of memory for instance, it cannot, and its ranks
    would train on.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        was_too_late = os.getpid() == _PROCESS and os.getppid() != _PARENT
        if was_too_late:  # torchrun has ended already, and no signal will come
            signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def process_group(backend: str = "gloo", **options: Any) -> Iterator[None]:
    """A process group of all ranks for the block; `options` go to `init_process_group`.

    After an error in the block nobody waits: the group of several ranks is not destroyed. nccl's
    `destroy_process_group` waits until all ranks have called it. The others wait in a collective for the rank that
    raised, so it aborts its group. gloo's closes the connections, and the other ranks would raise too, perhaps before
    torchrun has been given this rank's traceback. The group of a single process is destroyed, so that a notebook can
    make another one.
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
    """Destroy the process group of this rank, if there is one. A model in DistributedDataParallel may outlive it.

    Whoever drops the last reference to a group waits for the group's threads. Two holders must not be the last:
    a model in DistributedDataParallel, which waits with the GIL held (with torch 2.11 for ever, where a thread wants
    the GIL), and a communication hook in Python, which runs on such a thread and would wait for itself (the process
    ends with "Resource deadlock avoided"). So a reference is kept here until the next group is left, or until
    `free_left_group` drops it with the GIL released.
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
