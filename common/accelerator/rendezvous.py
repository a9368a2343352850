"""The rendezvous of all ranks before their process group exists: the id of this attempt, and a check of the backends.

torchrun keeps one store over restarts. A group that is set up a second time would find the addresses of dead ranks
under the old keys, so each attempt needs keys of its own. The restart count does not tell attempts apart, because a
change of membership leaves it as it was. So rank 0 draws an id for the attempt, and the other ranks request it. Each
request has an id of its own, because the one in the store may be that of a dead rank:

    rendezvous/request/R          rank R      the id of its request
    rendezvous/reply/REQUEST      rank 0      the id of this attempt
    rendezvous/ATTEMPT/R          rank R      as JSON: the backend that its node has chosen, and the host
    rendezvous/ATTEMPT/choices    rank 0      as JSON: the list of these pairs, in rank order
    rendezvous/ATTEMPT/read/R     rank R      empty; written only when the choices differ
"""

import contextlib
import json
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLLING_SECONDS = 0.005
TIME_TO_READ = timedelta(seconds=10)


def join_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta, backend: str) -> str:
    """Wait for all ranks, and return the id of this attempt, which they share and no earlier attempt had.

    The backends are compared here because a group of nccl and gloo ranks would wait for ever.

    Raises:
        TimeoutError: on rank 0, naming the ranks that did not show up.
        torch.distributed.DistError: on another rank, if the store's own timeout passes before rank 0 replies.
        ValueError: on every rank, if the backends differ; it names the nodes and what each chose.
    """
    choice = [backend, socket.gethostname()]
    if rank == 0:
        attempt = uuid.uuid4().hex
        choices = [choice, *_reply_to_all(store, attempt, world_size, timeout)]
        store.set(f"rendezvous/{attempt}/choices", json.dumps(choices))
    else:
        request = uuid.uuid4().hex
        store.set(f"rendezvous/request/{rank}", request)
        attempt = store.get(f"rendezvous/reply/{request}").decode()
        store.set(f"rendezvous/{attempt}/{rank}", json.dumps(choice))
        choices = json.loads(store.get(f"rendezvous/{attempt}/choices"))
    backends = {chosen for chosen, _ in choices}
    if len(backends) > 1:
        if rank == 0:
            # The process of rank 0 may hold the store, so the others must have read it. One of them may have died.
            keys = [f"rendezvous/{attempt}/read/{other}" for other in range(1, world_size)]
            with contextlib.suppress(RuntimeError):
                store.wait(keys, TIME_TO_READ)
        else:
            store.set(f"rendezvous/{attempt}/read/{rank}", "")
        different = ", ".join(dict.fromkeys(f"{chosen} on {host}" for chosen, host in choices))
        raise ValueError(
            f"the nodes chose different backends: {different}. nccl needs a GPU for every process of every node: start "
            "as many processes as the smallest node has GPUs, or let all compute on the CPU"
        )
    return attempt


def _reply_to_all(store: dist.Store, attempt: str, world_size: int, timeout: timedelta) -> list[list[str]]:
    """Reply to the requests of the other ranks until all have joined. Returns their choices, in rank order."""
    absent = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while absent:
        for other in sorted(absent):
            if store.check([f"rendezvous/{attempt}/{other}"]):
                absent.remove(other)
            elif store.check([f"rendezvous/request/{other}"]):
                # If the request is a dead rank's, nobody reads this reply, and the new rank's request comes later.
                request = store.get(f"rendezvous/request/{other}").decode()
                store.set(f"rendezvous/reply/{request}", attempt)
        if absent and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} of {world_size} did not join within {timeout}")
        time.sleep(POLLING_SECONDS)
    return [json.loads(store.get(f"rendezvous/{attempt}/{other}")) for other in range(1, world_size)]
