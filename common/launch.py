"""The variables by which a launcher tells a process of its place in the run and of the launcher's configuration."""

import os
import socket
from typing import NamedTuple

# `python -m common.accelerator launch` sets these from its file and its flags.
LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"
LAUNCHER_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
LAUNCHER_THREADS = "ACCELERATE_CPU_THREADS"


class Launch(NamedTuple):
    """The place of this process in the run, known before there is a process group. Alone it is rank 0 of 1.

    Attributes:
        rank: the number of this process in the run, counted from 0.
        world_size: the number of processes of the run.
        local_rank, local_world_size: the same among the processes of this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_launch() -> Launch:
    return Launch(
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables from which torch.distributed reads a rank of this machine, and its address."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port of this machine that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
