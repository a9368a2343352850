"""What a launcher tells a process in variables: its place in the run, and settings. Ranks are given the same here."""

import os
import socket
from typing import NamedTuple

from common.errors import fail

# `python -m common.accelerator launch` sets these from its file and its flags.
LAUNCHER_PRECISION = "ACCELERATE_MIXED_PRECISION"
LAUNCHER_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
LAUNCHER_THREADS = "ACCELERATE_CPU_THREADS"


class Launch(NamedTuple):
    """The place of this process in the run, known before there is a process group. Alone it is rank 0 of 1.

    `local_rank` and `local_world_size` are the same among the processes of this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_launch() -> Launch:
    """The place of this process, from torchrun's variables. Raises UserError for one that is no such number."""
    numbers = []
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        text = os.environ.get(name, str(least))
        if not text.isdecimal() or int(text) < least:
            fail(f"{name} is {text!r}: it must be a whole number of at least {least}")
        numbers.append(int(text))
    return Launch(*numbers)


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
