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

from common.exercises.compare import flat, near, plain, scaled, shown, side_by_side
from common.exercises.handles import Handle, refuse_forgotten_handles
from common.exercises.stage import Place, SolutionFailed, in_rounds, load_name, on_ranks
from common.process_group import COLLECTIVES

MINUTES = 40
READ = "02_ddp_raw/README.md"
SAME_AS = "torch's all_reduce, with as few numbers on each link as a ring needs"
WORLD_SIZES = (3, 2)
SIZES = (6, 7)  # on three ranks in equal chunks, and in chunks of 3, 2 and 2


class Traffic:
    """The calls of a solution on one rank.

    Attributes:
        collectives: those that were called, by name.
        sent: the numbers in each message to the right neighbour.
        handles: of all messages that were begun and not waited for at once.
    """

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.sent: list[list[float]] = []
        self.handles: list[Handle] = []
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def note_send(self, peer: int, tensor: Tensor) -> None:
        right = (self.rank + 1) % self.world_size
        if peer != right:
            raise SolutionFailed(
                f"rank {self.rank} sends to rank {peer}: in a ring each rank sends to its right neighbour only,"
                f" (rank + 1) % world size, here rank {right}"
            )
        self.sent.append(plain(tensor.flatten()))

    def note_receive(self, peer: int, tensor: Tensor) -> None:
        left = (self.rank - 1) % self.world_size
        if peer != left:
            raise SolutionFailed(
                f"rank {self.rank} receives from rank {peer}: in a ring each rank receives from its left neighbour"
                f" only, (rank - 1) % world size, here rank {left}"
            )


def chunk_sizes(size: int, world_size: int) -> list[int]:
    """The sizes of the chunks of `size` numbers, as tensor_split cuts them."""
    return [len(chunk) for chunk in torch.empty(size).tensor_split(world_size)]


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
    refuse_forgotten_handles(traffic.handles)
    return {
        "own": plain(numbers_of(rank, size)),
        "after": plain(tensor),
        "expected": plain(expected),
        "collectives": traffic.collectives,
        "sent": traffic.sent,
    }


def check(path: Path) -> list[str]:
    """Six and seven numbers on three ranks, and on two. With equal chunks a wrong chunk arrives, and can be shown."""

    def on(world_size: int) -> list[str]:
        for size in SIZES:
            results = on_ranks(world_size, functools.partial(run, size=size), path, why_it_hangs)
            found = wrong_sums(results) or wrong_chunks(results)
            if found:
                return [f"{size} numbers on {world_size} ranks: {found}"]
        return []

    return in_rounds(WORLD_SIZES, on)


def why_it_hangs(places: Sequence[Place | None]) -> str | None:
    codes = [place.code if place else "" for place in places]
    if all("send(" in code for code in codes):
        return (
            "every rank waits in send until its neighbour receives, and the neighbour does the same: begin the send"
            " with isend, receive, and then wait for the send"
        )
    if all("recv(" in code for code in codes):
        return "every rank waits in recv for a neighbour that has not sent yet: begin to send before you receive"
    if all("wait(" in code for code in codes):
        return (
            "every rank is in wait(), until a neighbour answers, and the neighbour is in wait() too: begin to send,"
            " then receive, and wait for the send after that"
        )
    return "each message has to be sent by one rank and received by its right neighbour, equally often on all ranks"


def wrong_sums(results: list[dict]) -> str | None:
    """A finding about the numbers: rank 0 brings 1, rank 1 brings 10 and rank 2 brings 100 to each of them."""
    collectives = [name for result in results for name in result["collectives"]]
    if collectives:
        return f"dist.{collectives[0]} was called: build the all-reduce from sends and receives of two ranks each"
    after = [result["after"] for result in results]
    own = [result["own"] for result in results]
    expected = results[0]["expected"]
    if near(after, [expected] * len(results)):
        return None
    title = wrong_on_the_whole(results) or wrong_contributions(results)
    if title is None:
        title = (
            "the numbers are not the sums over the ranks. A rank's first message is the chunk of its own number, and"
            " each later one is the chunk that the message before has brought, which is one number lower"
        )
    brings = ", ".join(f"rank {rank} brings {shown(of_rank[0])}" for rank, of_rank in enumerate(own))
    messages = f"each has sent {len(results[0]['sent'])} messages, of {2 * (len(results) - 1)}"
    return side_by_side(f"{title} ({brings}; {messages}):", after, they_should_be=expected)


def wrong_on_the_whole(results: list[dict]) -> str | None:
    """The mistake, if it can be seen without asking whose numbers are in a sum."""
    world_size = len(results)
    after = [result["after"] for result in results]
    own = [result["own"] for result in results]
    expected = results[0]["expected"]
    steps = 2 * (world_size - 1)
    steps_made = [len(result["sent"]) for result in results]
    in_chunks = len(expected) - len(expected) % world_size  # numbers that are in one where each chunk is too small
    last_in_none = [expected[:in_chunks] + of_rank[in_chunks:] for of_rank in own]
    if near(after, own):
        return "each rank still has its own numbers: what arrives has to be written into `tensor`"
    if near(after, [scaled(expected, 1 / world_size)] * world_size):
        return "these are the means over the ranks, and the sums were asked for: do not divide"
    if steps_made not in ([steps] * world_size, [steps / 2] * world_size):
        return too_few_steps(steps_made)
    if near(after, last_in_none):
        return (
            f"the chunks are too small, so that the last numbers are in none of them: {len(expected)} numbers have"
            f" chunks of {shown(chunk_sizes(len(expected), world_size))}, which tensor_split({world_size}) cuts"
        )
    return None


def too_few_steps(steps_made: list[int]) -> str:
    steps = 2 * (len(steps_made) - 1)
    return (
        f"each half of the ring has W - 1 steps, so that a rank sends {steps} chunks in all; these ranks have sent"
        f" {shown(steps_made)}"
    )


def wrong_contributions(results: list[dict]) -> str | None:
    """The mistake, if whose numbers are in the sums shows it."""
    world_size = len(results)
    after = [result["after"] for result in results]
    expected = results[0]["expected"]
    counts = [counted(number) for number in flat(after)]
    passed_on = []
    begins = []
    for result in results:
        passed_on += flat(result["sent"][1 : world_size - 1])  # in the first half, after the rank's own chunk
        if len(result["sent"]) >= world_size:
            begins += result["sent"][world_size - 1]  # the second half
    sums_passed_on = [number for number in passed_on if not is_of_one_rank(counted(number))]
    begins_finished = any(near(number, expected[0]) for number in begins)
    finished = [sum(map(near, of_rank, expected)) for of_rank in after]
    one_chunk_finished = finished == [len(expected) // world_size] * world_size
    steps_made = [len(result["sent"]) for result in results]
    some_twice = any(max(count) > 1 for count in counts)
    if some_twice and all(map(is_of_one_rank, counts)):
        return (
            "each number is that of one rank, added to itself: what arrived was written over your own chunk before the"
            " two were added. In the first half receive into a tensor beside it, such as torch.empty_like(chunk)"
        )
    if max(steps_made) < world_size and not one_chunk_finished and world_size > 2:
        return too_few_steps(steps_made)
    if passed_on and not sums_passed_on:
        return (
            "no sum was passed on in the first half. In each of its steps a rank adds what arrives to its chunk of the"
            " same number, and sends this very chunk in the next step: the numbers go down by one from step to step. It"
            " adds in place (chunk += arrived): chunk + arrived and chunk.add(arrived) are new tensors"
        )
    if some_twice:
        return (
            "some numbers are in a sum more than once: in the second half of the ring a chunk that arrives is finished,"
            " so copy it and do not add it (and never add what recv returns: that is the number of the sender)"
        )
    if sums_are_in_new_tensors(results):
        return (
            "the sums of the first half are right, and were sent, but they are not in `tensor`: chunk + arrived is a"
            " new tensor, and chunk += arrived adds in place. A chunk is a view, so `tensor` then has the sum too"
        )
    if one_chunk_finished:
        return (
            "each rank has one finished chunk, so the first half, the reduce-scatter, is right; now send the finished"
            " chunks around, the all-gather, and write what arrives into `tensor`, not into a new tensor"
        )
    if not any(finished) or (begins and not begins_finished):
        return (
            "no chunk is finished after the first half, or another one was sent as the first of the second half. In the"
            " first half a rank adds what arrives to its chunk of the same number, and passes that chunk on in the next"
            " step. Then its chunk (rank + 1) % world size is finished, and with this one, not with the chunk of its"
            " own number, the second half begins"
        )
    return None


def counted(number: float) -> list[int]:
    """How often each rank's contribution is in a sum: its decimal digits."""
    if number != number or number < 0 or number > 10**9:
        return [0]
    return [int(digit) for digit in str(round(number))]


def is_of_one_rank(count: list[int]) -> bool:
    return count.count(0) == len(count) - 1


def sums_are_in_new_tensors(results: list[dict]) -> bool:
    """True where every rank began the second half by sending a sum over all ranks that is not in its tensor."""
    world_size = len(results)
    expected = results[0]["expected"]
    for rank, result in enumerate(results):
        number = (rank + 1) % world_size
        chunk = torch.tensor(result["after"]).tensor_split(world_size)[number].tolist()
        finished = torch.tensor(expected).tensor_split(world_size)[number].tolist()
        if len(result["sent"]) < world_size or result["sent"][world_size - 1] != finished or chunk == finished:
            return False
    return True


def wrong_chunks(results: list[dict]) -> str | None:
    """A finding about how many numbers each rank has sent, in all and in a message."""
    world_size = len(results)
    size = len(results[0]["expected"])
    sizes = [list(map(len, result["sent"])) for result in results]
    # Each rank sends W - 1 chunks in each half, and no chunk has more than a W-th of the numbers, rounded up.
    most = 2 * (world_size - 1) * math.ceil(size / world_size)
    if max(map(sum, sizes)) > most:
        title = (
            f"the sums are right, but more was sent than in a ring with chunks: cut the {size} numbers into"
            f" {world_size} chunks, and send one chunk in each of the {2 * (world_size - 1)} steps; the numbers sent:"
        )
        return side_by_side(title, list(map(sum, sizes)), at_most=most)
    return None
