"""The meeting of all ranks before their process group exists: a new name for the group, and the check of its backend.

torchrun keeps one store over restarts. A group that is set up a second time would find the addresses of dead ranks
under the old keys, so each attempt needs keys of its own. The restart count does not tell attempts apart, because a
change of membership leaves it as it was. So rank 0 draws a name, and gives it to each rank R that shows a new token:

    meet/token/R            rank R      its token
    meet/name/TOKEN         rank 0      the name of this attempt
    meet/NAME/R             rank R      the backend that its node has chosen, and the host
    meet/NAME/choices       rank 0      what all ranks have chosen, a line for each
    meet/NAME/leaving/R     rank R      it has read that they differ
"""

import contextlib
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLLING_SECONDS = 0.005
TIME_TO_READ = timedelta(seconds=10)


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta, backend: str) -> str:
    """A name for this attempt that all its ranks use and no earlier attempt has used.

    The backends are compared here because a group of nccl and gloo ranks would wait for ever.

    Raises:
        TimeoutError: on rank 0, naming the ranks that did not show up.
        ValueError: on every rank, if the backends differ; it names the nodes and what each chose.
    """
    choice = f"{backend} on {socket.gethostname()}"
    if rank == 0:
        name = uuid.uuid4().hex
        choices = [choice, *_admit_all(store, name, world_size, timeout)]
        store.set(f"meet/{name}/choices", "\n".join(choices))
    else:
        name = _ask_for_name(store, rank, choice)
        choices = store.get(f"meet/{name}/choices").decode().split("\n")
    backends = {each.partition(" on ")[0] for each in choices}
    if len(backends) > 1:
        _wait_for_readers(store, name, rank, world_size)
        different = ", ".join(dict.fromkeys(choices))
        raise ValueError(
            f"the nodes chose different backends: {different}. nccl needs a GPU for every process of every node: start "
            "as many processes as the smallest node has GPUs, or let all compute on the CPU"
        )
    return name


def _ask_for_name(store: dist.Store, rank: int, choice: str) -> str:
    token = uuid.uuid4().hex
    store.set(f"meet/token/{rank}", token)
    name = store.get(f"meet/name/{token}").decode()
    store.set(f"meet/{name}/{rank}", choice)
    return name


def _admit_all(store: dist.Store, name: str, world_size: int, timeout: timedelta) -> list[str]:
    """Give the name of this attempt to all other ranks. Returns their choices, in rank order."""
    absent = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while absent:
        for other in sorted(absent):
            if store.check([f"meet/{name}/{other}"]):
                absent.remove(other)
            elif store.check([f"meet/token/{other}"]):
                # The token may be a dead rank's. Then nobody reads this answer, and the new rank's token comes later.
                token = store.get(f"meet/token/{other}").decode()
                store.set(f"meet/name/{token}", name)
        if absent and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} of {world_size} did not join within {timeout}")
        time.sleep(POLLING_SECONDS)
    return [store.get(f"meet/{name}/{other}").decode() for other in range(1, world_size)]


def _wait_for_readers(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    """Wait on rank 0, whose process may hold the store, until all others have read what was chosen."""
    if rank > 0:
        store.set(f"meet/{name}/leaving/{rank}", "")
        return
    others = [f"meet/{name}/leaving/{other}" for other in range(1, world_size)]
    with contextlib.suppress(RuntimeError):  # a rank may have died
        store.wait(others, TIME_TO_READ)
