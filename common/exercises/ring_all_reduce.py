"""The checker of `ring_all_reduce`: what was sent to whom, message by message, and which sums came out."""

import math
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.compare import Mistake, as_numbers, by_rank, flat, near, shown
from common.exercises.traffic import POINT_TO_POINT, Traffic
from common.small.ring import ring_messages

SIZE = 7  # on three ranks the chunks have 3, 2 and 2 numbers


def numbers_of_rank() -> Tensor:
    """Numbers whose sums say whose they are: 1, 2, 3 … of rank 0, 10, 20, 30 … of rank 1, and so on."""
    return torch.arange(1, SIZE + 1).double() * 10 ** dist.get_rank()


class Expected(NamedTuple):
    """The sums, and the chunks that were sent, one after the other."""

    sums: list
    sent: list


class Result(NamedTuple):
    """The tensor after the call, the chunks that were sent, to which ranks, and the collectives that were called."""

    after: list
    sent: list
    receivers: list[int]
    collectives: list[str]


def reference() -> Expected:
    tensor = numbers_of_rank()
    chunks = tensor.tensor_split(dist.get_world_size())
    sent = []
    for message in ring_messages(tensor):
        sent.append(as_numbers(chunks[message.sent]))
    return Expected(as_numbers(tensor), sent)


def attempt(solution: ModuleType, traffic: Traffic) -> Result:
    tensor = numbers_of_rank()
    solution.ring_all_reduce(tensor)
    sends = [message for message in traffic.messages if message.name == "isend"]
    return Result(
        after=as_numbers(tensor),
        sent=[as_numbers(message.sent.flatten()) for message in sends],
        receivers=[message.arguments.get("dst", message.arguments.get("group_dst")) for message in sends],
        collectives=[message.name for message in traffic.messages if message.name not in POINT_TO_POINT],
    )


def check(actual: list[Result], expected: list[Expected]) -> None:
    world_size = len(actual)
    for rank, result in enumerate(actual):
        if result.collectives:
            raise Mistake(f"build the all-reduce from sends and receives, and without dist.{result.collectives[0]}")
        for receiver in result.receivers:
            if receiver != (rank + 1) % world_size:
                raise Mistake(
                    f"rank {rank} has sent to rank {receiver}: in a ring each rank sends to its right neighbour only, "
                    "(rank + 1) % world size, and receives from its left one, (rank - 1) % world size"
                )
    sums = expected[0].sums
    after = [result.after for result in actual]
    if not near(after, [sums] * world_size):
        check_messages(actual, expected)
        raise Mistake(
            "all messages were right, but the sums are not in `tensor`: write each into its chunk, which is a view of "
            "it (chunk += arrived, chunk.copy_(arrived); chunk + arrived is a new tensor), and do not divide",
            by_rank(after) | {"the sums": sums},
        )
    sent = [len(flat(result.sent)) for result in actual]
    # Each rank sends W - 1 chunks in each half, and no chunk has more than a W-th of the numbers, rounded up.
    most = 2 * (world_size - 1) * math.ceil(SIZE / world_size)
    if max(sent) > most:
        numbers = by_rank(sent) | {"at most": most}
        raise Mistake("the sums are right, but more numbers were sent than in a ring with chunks", numbers)


def check_messages(actual: list[Result], expected: list[Expected]) -> None:
    """Raise a Mistake about the first message that is not the one of the small ring."""
    for step in range(len(expected[0].sent)):
        for rank, (result, right) in enumerate(zip(actual, expected, strict=True)):
            message = result.sent[step] if step < len(result.sent) else None
            if not near(message, right.sent[step]):
                raise Mistake(
                    f"message {step + 1} of rank {rank} is {shown(message)}, and should be {shown(right.sent[step])}. "
                    "In the first half a rank adds what arrives to its chunk of the same number, in place, and sends "
                    "this chunk next. The second half begins with the chunk (rank + 1) % world size, which is "
                    "finished: copy what arrives, do not add it, and send it next"
                )
