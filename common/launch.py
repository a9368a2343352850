"""The place of this process among those of its run, as the launcher says it, before there is a process group."""

import os
from typing import NamedTuple


class Launch(NamedTuple):
    """The variables that torchrun and other launchers set; a process that was started alone is rank 0 of 1.

    Attributes:
        rank, world_size: the number of this process, and of how many processes of the whole run.
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
