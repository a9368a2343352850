"""The checker of `ring_all_reduce`: whose numbers are in each sum, and what was sent to whom."""

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common.ladder.exercises.compare import near, plain, scaled, shown, side_by_side
from common.ladder.exercises.stage import Place, SolutionFailed, load_name, on_ranks

MINUTES = 40
READ = "02_ddp_raw/README.md"
SAME_AS = "torch's all_reduce, with as few numbers on each link as a ring needs"
WORLD_SIZE = 3
SIZES = (6, 7)  # in three equal chunks, and in chunks of 3, 2 and 2
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


class Handle:
    """What isend or irecv returns to a solution: the handle of torch, and whether it was waited for.

    It keeps torch's handle, with which the message would go: then the same happens each time that it is forgotten.
    """

    def __init__(self, call: str, work: Any) -> None:
        self.call = call
        self.work = work
        self.was_waited_for = False

    def wait(self, *timeout: Any) -> bool:
        self.was_waited_for = True
        return self.work.wait(*timeout)


class Traffic:
    """The calls of a solution on one rank.

    Attributes:
        collectives: those that were called, by name.
        sent: how many numbers are in each message to the right neighbour.
        received: for how many numbers there is room in each receive from the left neighbour.
        handles: of all messages that were begun and not waited for at once.
    """

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.sent: list[int] = []
        self.received: list[int] = []
        self.handles: list[Handle] = []
        self.rank = dist.get_rank()

    def note_send(self, peer: int, tensor: Tensor) -> None:
        right = (self.rank + 1) % WORLD_SIZE
        if peer != right:
            raise SolutionFailed(
                f"rank {self.rank} sends to rank {peer}: in a ring each rank sends to its right neighbour only,"
                f" (rank + 1) % world size, here rank {right}"
            )
        self.sent.append(tensor.numel())
        refuse_other_size(self.rank, right, len(self.sent), sent=tensor)

    def note_receive(self, peer: int, tensor: Tensor) -> None:
        left = (self.rank - 1) % WORLD_SIZE
        if peer != left:
            raise SolutionFailed(
                f"rank {self.rank} receives from rank {peer}: in a ring each rank receives from its left neighbour"
                f" only, (rank - 1) % world size, here rank {left}"
            )
        self.received.append(tensor.numel())
        refuse_other_size(left, self.rank, len(self.received), room=tensor)

    def refuse_forgotten_handles(self) -> None:
        forgotten = [handle.call for handle in self.handles if not handle.was_waited_for]
        if forgotten:
            raise SolutionFailed(
                f"rank {self.rank} has not called wait() on these handles: {shown(forgotten)}. Before it returns, what"
                " isend sends may not have gone, and what irecv receives may not have come"
            )


def refuse_other_size(
    sender: int, receiver: int, message: int, sent: Tensor | None = None, room: Tensor | None = None
) -> None:
    """Raise SolutionFailed if a message is of another size or dtype than the room for it. Both ranks call this.

    Each leaves its own in the store of the process group. Whoever comes second compares, and does not send or
    receive: gloo would end the process of a rank whose room is too small, and leave a part of a larger one as it was.

    Args:
        message: its number among those from `sender` to `receiver`.
    """
    store = dist.PrefixStore(f"{sender} to {receiver}, {message}", dist.distributed_c10d._get_default_store())
    for side, tensor in {"sent": sent, "room": room}.items():
        if tensor is not None:
            store.set(side, f"{tensor.numel()} {tensor.dtype}")
    if not store.check(["sent", "room"]):
        return
    numbers, dtype = store.get("sent").decode().split()
    room_numbers, room_dtype = store.get("room").decode().split()
    which = f"(message {message} from rank {sender} to rank {receiver})"
    if numbers != room_numbers:
        raise SolutionFailed(
            f"rank {sender} sends {numbers} numbers to rank {receiver}, which has room for {room_numbers} {which}. Both"
            " have to mean the same chunk, and chunks need not be equally large: cut the tensor alike on all ranks,"
            " and receive into as much room as the chunk has that arrives, which is the one that the left neighbour"
            " sends in this step"
        )
    if dtype != room_dtype:
        raise SolutionFailed(
            f"rank {sender} sends {dtype} to rank {receiver}, which has room for {room_dtype} {which}. Receive into the"
            " chunk's own dtype, which torch.empty_like(chunk) takes over"
        )


@contextmanager
def observed() -> Iterator[Traffic]:
    """A block in which the calls of torch.distributed's functions are noted."""
    traffic = Traffic()

    def noted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            traffic.collectives.append(name)
            return original(*args, **kwargs)

        return call

    inside = threading.local()  # has a name while this thread is in a call that is noted already: send calls isend

    def noted_message(name: str, peer_names: Sequence[str], note: Callable[[int, Tensor], None]) -> Any:
        original = getattr(dist, name)
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if hasattr(inside, "name"):
                return original(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            peers = [arguments[peer] for peer in peer_names if arguments.get(peer) is not None]
            if peers:  # else a message from any rank will do
                note(peers[0], arguments["tensor"])
            inside.name = name
            try:
                work = original(*args, **kwargs)
            finally:
                del inside.name
            if name in ("send", "recv"):
                return work
            traffic.handles.append(Handle(name, work))
            return traffic.handles[-1]

        return call

    messages = {name: noted_message(name, ("dst", "group_dst"), traffic.note_send) for name in ("send", "isend")}
    messages |= {name: noted_message(name, ("src", "group_src"), traffic.note_receive) for name in ("recv", "irecv")}
    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, noted(name)))
        for name, patched in messages.items():
            patches.enter_context(mock.patch.object(dist, name, patched))
            # batch_isend_irecv compares its operations with these.
            patches.enter_context(mock.patch.object(dist.distributed_c10d, name, patched))
        yield traffic


def numbers_of(rank: int, size: int) -> Tensor:
    """Numbers whose sum says whose they are: 1, 10 or 100."""
    return torch.full((size,), 10**rank).double()


def run(path: str, size: int) -> dict:
    """On one rank: the tensor after the solution was called, and the traffic."""
    rank = dist.get_rank()
    expected = numbers_of(rank, size)
    dist.all_reduce(expected)
    with observed() as traffic:
        ring_all_reduce = load_name(path, "ring_all_reduce")
        tensor = numbers_of(rank, size)
        ring_all_reduce(tensor)
    traffic.refuse_forgotten_handles()
    return {
        "own": plain(numbers_of(rank, size)),
        "after": plain(tensor),
        "expected": plain(expected),
        "collectives": traffic.collectives,
        "sent": traffic.sent,
    }


def check(path: Path) -> list[str]:
    """Six and seven numbers on three ranks. With equal chunks a wrong chunk arrives, and can be shown."""
    for size in SIZES:
        try:
            results = on_ranks(WORLD_SIZE, functools.partial(run, size=size), path, why_it_hangs)
        except SolutionFailed as failure:
            return [str(failure)]
        found = wrong_sums(results) or wrong_amount(results)
        if found:
            return [f"{size} numbers on {WORLD_SIZE} ranks: {found}"]
    return []


def why_it_hangs(places: Sequence[Place | None]) -> str | None:
    codes = [place.code if place else "" for place in places]
    if all("send(" in code for code in codes):
        return (
            "every rank waits in send until its neighbour receives, and the neighbour does the same: begin the send"
            " with isend, receive, and then wait for the send"
        )
    if all("recv(" in code for code in codes):
        return "every rank waits in recv for a neighbour that has not sent yet: begin to send before you receive"
    return "each message has to be sent by one rank and received by its right neighbour, equally often on all ranks"


def wrong_sums(results: list[dict]) -> str | None:
    """A finding about the numbers: rank 0 brings 1, rank 1 brings 10 and rank 2 brings 100 to each of them."""
    collectives = [name for result in results for name in result["collectives"]]
    if collectives:
        return f"dist.{collectives[0]} was called: build the all-reduce from sends and receives of two ranks each"
    after = [result["after"] for result in results]
    expected = results[0]["expected"]
    if near(after, [expected] * WORLD_SIZE):
        return None
    own = [result["own"] for result in results]
    counts = [counted(number) for of_rank in after for number in of_rank]
    finished = [sum(map(near, of_rank, expected)) for of_rank in after]
    steps = 2 * (WORLD_SIZE - 1)
    steps_made = [len(result["sent"]) for result in results]
    title = "the numbers are not the sums over the ranks"
    if near(after, own):
        title = "each rank still has its own numbers: what arrives has to be written into `tensor`"
    elif near(after, [scaled(expected, 1 / WORLD_SIZE)] * WORLD_SIZE):
        title = "these are the means over the ranks, and the sums were asked for: do not divide"
    elif steps_made not in ([steps] * WORLD_SIZE, [steps / 2] * WORLD_SIZE):
        title = (
            f"each half of the ring has W - 1 steps, so that a rank sends {steps} chunks in all; these ranks have sent"
            f" {shown(steps_made)}"
        )
    elif any(max(count) > 1 for count in counts):
        title = (
            "some numbers are in a sum more than once: in the second half of the ring a chunk that arrives is finished,"
            " so copy it and do not add it (and never add what recv returns: that is the number of the sender)"
        )
    elif finished == [len(expected) // WORLD_SIZE] * WORLD_SIZE:
        title = (
            "each rank has one finished chunk, so the first half, the reduce-scatter, is right; now send the finished"
            " chunks around, the all-gather, and write what arrives into `tensor`, not into a new tensor"
        )
    elif not any(finished):
        title = (
            "no chunk is finished. In the first half a rank adds what arrives to its chunk of the same number, and"
            " passes that chunk on in the next step. Then its chunk (rank + 1) % world size is finished, and with this"
            " one, not with the chunk of its own number, the second half begins"
        )
    brings = "rank 0 brings 1, rank 1 brings 10, rank 2 brings 100"
    return side_by_side(f"{title} ({brings}):", after, they_should_be=expected)


def counted(number: float) -> list[int]:
    """How often each rank's contribution is in a sum: its decimal digits."""
    if number != number or number < 0 or number > 10**9:
        return [0]
    return [int(digit) for digit in str(round(number))]


def wrong_amount(results: list[dict]) -> str | None:
    """A finding about how many numbers each rank has sent."""
    size = len(results[0]["expected"])
    sent = [sum(result["sent"]) for result in results]
    # Each rank sends W - 1 chunks in each half, and no chunk has more than a W-th of the numbers, rounded up.
    most = 2 * (WORLD_SIZE - 1) * math.ceil(size / WORLD_SIZE)
    if max(sent) > most:
        title = (
            f"the sums are right, but more was sent than in a ring with chunks: cut the {size} numbers into"
            f" {WORLD_SIZE} chunks, and send one chunk in each of the {2 * (WORLD_SIZE - 1)} steps; the numbers sent:"
        )
        return side_by_side(title, sent, at_most=most)
    return None
