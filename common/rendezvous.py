"""The store in which the processes of one attempt meet, and see that all chose the same backend."""

import contextlib
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

AGREED = "agreed"
POLLING_SECONDS = 0.005
TIME_TO_READ = timedelta(seconds=10)


def meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta, backend: str) -> str:
    """A name for this attempt that all its ranks use and no earlier attempt used.

    torchrun keeps one store over restarts, and a group set up a second time finds the addresses of the dead ranks
    under the old keys. The restart count does not tell attempts apart: a change of membership leaves it as it was. So
    rank 0 picks the name and hands it to every rank that presents a token made just now.

    Each rank says at the same time which backend its node chose. A group of nccl and gloo ranks would wait for ever.

    Raises:
        TimeoutError: on rank 0, naming the ranks that did not show up.
        ValueError: on every rank, if the backends differ; it names the nodes and what each chose.
    """
    choice = f"{backend} on {socket.gethostname()}"
    if rank == 0:
        name, choices = _admit_all(store, world_size, timeout)
        verdict = _compare_backends([choice, *choices])
        store.set(f"meet/{name}/verdict", verdict)
    else:
        name = _ask_for_name(store, rank, choice)
        verdict = store.get(f"meet/{name}/verdict").decode()
    if verdict != AGREED:
        _wait_for_readers(store, name, rank, world_size)
        raise ValueError(verdict)
    return name


def _ask_for_name(store: dist.Store, rank: int, choice: str) -> str:
    token = uuid.uuid4().hex
    store.set(f"meet/token/{rank}", token)
    name = store.get(f"meet/name/{token}").decode()
    store.set(f"meet/{name}/{rank}", choice)
    return name


def _admit_all(store: dist.Store, world_size: int, timeout: timedelta) -> tuple[str, list[str]]:
    """Give the name to all other ranks; returns it and what they chose, in rank order."""
    name = uuid.uuid4().hex
    absent = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while absent:
        for other in sorted(absent):
            if store.check([f"meet/{name}/{other}"]):
                absent.remove(other)
            elif store.check([f"meet/token/{other}"]):
                # The token may be that of a dead rank. Then nobody reads the answer, and the living one asks again.
                token = store.get(f"meet/token/{other}").decode()
                store.set(f"meet/name/{token}", name)
        if absent and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} of {world_size} did not join within {timeout}")
        time.sleep(POLLING_SECONDS)
    choices = [store.get(f"meet/{name}/{other}").decode() for other in range(1, world_size)]
    return name, choices


def _wait_for_readers(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    """Rank 0 may hold the store: it waits a little until all others have read the verdict."""
    if rank > 0:
        store.set(f"meet/{name}/leaving/{rank}", "")
        return
    others = [f"meet/{name}/leaving/{other}" for other in range(1, world_size)]
    with contextlib.suppress(RuntimeError):  # a rank that died says nothing any more
        store.wait(others, TIME_TO_READ)


def _compare_backends(choices: list[str]) -> str:
    """AGREED, or a sentence with what each node chose. `choices` holds "backend on host" in rank order."""
    backends = {choice.partition(" on ")[0] for choice in choices}
    if len(backends) == 1:
        return AGREED
    different = ", ".join(dict.fromkeys(choices))
    return (
        f"the nodes chose different backends: {different}. nccl needs a GPU for every process of every node: start as "
        "many processes as the smallest node has GPUs, or let all compute on the CPU"
    )
