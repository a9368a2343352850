"""The checker of `ring_all_reduce`: what was sent to whom, message by message, and which sums came out."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.checker import Checker
from common.exercises.compare import flat, near, plain
from common.exercises.mistake import Mistake, SolutionFailed, shown
from common.exercises.stage import load_name
from common.exercises.traffic import Message, observed
from common.process_group import COLLECTIVES
from common.small.ring import ring_messages

# On three ranks chunks are equal, and 3, 2 and 2.
CASES = {"6 numbers on {} ranks": {"size": 6}, "7 numbers on {} ranks": {"size": 7}}


def numbers_of(rank: int, size: int) -> Tensor:
    """Numbers whose sums say whose they are: 1, 2, 3 … of rank 0, 10, 20, 30 … of rank 1, and so on."""
    return torch.arange(1, size + 1).double() * 10**rank


class Facts(NamedTuple):
    """The tensor after the call, and the chunks that were sent, one after the other."""

    after: list
    sent: list


def reference(size: int) -> Facts:
    tensor = numbers_of(dist.get_rank(), size)
    chunks = tensor.tensor_split(dist.get_world_size())
    sent = []
    for message in ring_messages(tensor):
        sent.append(plain(chunks[message.sent]))
    return Facts(plain(tensor), sent)


def attempt(path: str, size: int) -> Facts:
    tensor = numbers_of(dist.get_rank(), size)
    with observed() as traffic:
        traffic.note = check_neighbour
        load_name(path, "ring_all_reduce")(tensor)
    sent = [plain(message.sent.flatten()) for message in traffic.messages if message.name == "isend"]
    return Facts(plain(tensor), sent)


def check_neighbour(message: Message) -> None:
    """Raise SolutionFailed if a message is no send to the right neighbour, and no receive."""
    if message.name in COLLECTIVES:
        raise SolutionFailed(Mistake("a collective").at(f"dist.{message.name} was called"))
    rank = dist.get_rank()
    to = message.arguments.get("dst", message.arguments.get("group_dst"))
    if message.name == "isend" and to != (rank + 1) % dist.get_world_size():
        raise SolutionFailed(Mistake("wrong neighbour").at(f"rank {rank} has sent to rank {to}"))


def finding(made: Facts, expected: Facts) -> Mistake | None:
    world_size = len(made.after)
    sums = expected.after[0]
    if not near(made.after, expected.after):
        mistake = wrong_message(made, expected) or Mistake("not in the tensor")
        return mistake.with_values("the tensor after the call", made.after, {"they should be": sums})
    sent = [len(flat(of_rank)) for of_rank in made.sent]
    # Each rank sends W - 1 chunks in each half, and no chunk has more than a W-th of the numbers, rounded up.
    most = 2 * (world_size - 1) * math.ceil(len(sums) / world_size)
    if max(sent) > most:
        return Mistake("too much sent").with_values("numbers sent", sent, {"at most": most})
    return None


def wrong_message(made: Facts, expected: Facts) -> Mistake | None:
    """The mistake in the first message that is not the one of the small ring."""
    half = len(made.sent) - 1  # messages
    for step in range(2 * half):
        for rank, (sent, to_be_sent) in enumerate(zip(made.sent, expected.sent, strict=True)):
            message = sent[step] if step < len(sent) else None
            if not near(message, to_be_sent[step]):
                mistake = Mistake("reduce-scatter") if step < half else Mistake("all-gather")
                what = f"message {step + 1} of rank {rank} is {shown(message)}, and should be {shown(to_be_sent[step])}"
                return mistake.at(what)
    return None


CHECKER = Checker(reference, attempt, finding, world_sizes=(3, 2), cases=CASES)
