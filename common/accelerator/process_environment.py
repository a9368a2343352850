"""The place of this process in the run, its device, its threads and its backend, as the environment says.

torchrun writes RANK, WORLD_SIZE and so on for each process that it starts. `PartialState` calls these functions once.
"""

import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.cores import threads_per_worker
from common.launch import LAUNCHER_THREADS

PROCESS_VARIABLES = ("RANK", "LOCAL_RANK")
MEETING_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")  # not needed where the script gives another meeting point
# The times for which a collective waits for a missing rank where nobody says how long.
NCCL_TIMEOUT = timedelta(minutes=10)
GLOO_TIMEOUT = timedelta(minutes=30)


class Processes(NamedTuple):
    """This process among all processes of the run. `form_a_group` says whether they have, or need, a process group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    form_a_group: bool


def read_processes(gpus: int, needs_meeting_point: bool) -> Processes:
    """This process and its group: from the script's own process group, or else from the environment.

    Raises:
        ValueError: if the environment is incomplete or contradicts itself.
    """
    if dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = _read_local_world_size(world_size, gpus)
        return Processes(rank, world_size, local_rank, local_world_size, form_a_group=True)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    needed = PROCESS_VARIABLES + (MEETING_VARIABLES if needs_meeting_point else ())
    missing = [name for name in needed if not os.environ.get(name)]
    if world_size > 1 and missing:
        raise ValueError(f"WORLD_SIZE={world_size} needs {', '.join(missing)} too: start with torchrun")
    if missing or "WORLD_SIZE" not in os.environ:
        return Processes(0, world_size, 0, _read_local_world_size(world_size, gpus), form_a_group=False)
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    processes = Processes(rank, world_size, local_rank, _read_local_world_size(world_size, gpus), form_a_group=True)
    _check_ranks(processes, gpus)
    return processes


def _read_local_world_size(world_size: int, gpus: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text:
        return int(text)
    # Without it one process per GPU is assumed, as under Slurm.
    return min(world_size, gpus) if gpus else world_size


def _check_ranks(processes: Processes, gpus: int) -> None:
    """Refuse ranks that are out of range: the others would wait for such a rank until the time-out."""
    rank_fits = 0 <= processes.rank < processes.world_size
    local_rank_fits = 0 <= processes.local_rank < processes.local_world_size
    if not (rank_fits and local_rank_fits):
        raise ValueError(
            f"RANK={processes.rank} of WORLD_SIZE={processes.world_size} and LOCAL_RANK={processes.local_rank} of "
            f"{processes.local_world_size} (LOCAL_WORLD_SIZE, else {gpus} GPUs) do not fit together"
        )


def choose_device(cpu: bool, gpus: int, processes: Processes) -> torch.device:
    name = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if name:
        return torch.device(name)
    if processes.form_a_group:
        # On the CPU the original says cpu:0, which torch.load does not take for a place to put tensors.
        return torch.device("cuda", processes.local_rank % gpus) if gpus else torch.device("cpu")
    if torch.backends.mps.is_available() and not cpu:
        return torch.device("mps")
    return torch.device("cuda" if gpus else "cpu")


def share_cores(local_world_size: int) -> None:
    """Give all processes of this machine equally many threads; the launcher may say how many.

    torchrun grants one thread per process, whatever the number of cores. With a GPU, threads assemble batches.
    """
    threads = os.environ.get(LAUNCHER_THREADS) or threads_per_worker(local_world_size)
    torch.set_num_threads(int(threads))


def choose_backend(requested: str | None, gpus: int, local_world_size: int) -> str:
    if gpus:
        each_has_its_own = local_world_size <= gpus
        return requested or ("nccl" if each_has_its_own else "gloo")
    if requested not in (None, "gloo"):
        raise ValueError(f"Your assigned backend {requested} is not available, please use gloo")
    return "gloo"
