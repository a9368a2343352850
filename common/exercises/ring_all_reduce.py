"""The checker of `ring_all_reduce`: what was sent to whom, message by message, and which sums came out."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.compare import near, plain, shown, side_by_side
from common.exercises.stage import SolutionFailed, load_name
from common.exercises.traffic import Message, observed
from common.process_group import COLLECTIVES
from common.small.ring import ring_messages

MINUTES = 40
READ = "02_ddp_raw/README.md"
SAME_AS = "the small ring (common/small/ring.py), with as few numbers on each link"
WORLD_SIZES = (3, 2)
# On three ranks chunks are equal, and 3, 2 and 2.
CASES = {"6 numbers on {}": {"size": 6}, "7 numbers on {}": {"size": 7}}
# What the task says about the messages of each half.
RULES = (
    "the first step sends the chunk whose number is the rank's. In the first half a rank receives into a tensor of its"
    " own, adds it to its chunk of the same number, in place, and sends this chunk in the next step",
    "the second half begins with the chunk (rank + 1) % world size, which is finished. A chunk that arrives is finished"
    " too: copy it, do not add it, and send it in the next step",
)


def numbers_of(rank: int, size: int) -> Tensor:
    """Numbers whose sums say whose they are: 1, 2, 3 … of rank 0, 10, 20, 30 … of rank 1, and so on."""
    return torch.arange(1, size + 1).double() * 10**rank


def check_neighbour(message: Message) -> None:
    """Raise SolutionFailed if a message is no send to the right neighbour, and no receive."""
    if message.name in COLLECTIVES:
        raise SolutionFailed(
            f"dist.{message.name} was called: build the all-reduce from sends and receives of two ranks each"
        )
    rank = dist.get_rank()
    to = message.arguments.get("dst", message.arguments.get("group_dst"))
    if message.name == "isend" and to != (rank + 1) % dist.get_world_size():
        raise SolutionFailed(
            f"rank {rank} has sent to rank {to}: in a ring each rank sends to its right neighbour only, (rank + 1) %"
            " world size, and receives from its left one, (rank - 1) % world size"
        )


def run(path: str, size: int) -> dict:
    """On one rank: the tensor after the solution was called, and the messages that it has sent."""
    rank = dist.get_rank()
    tensor = numbers_of(rank, size)
    chunks = tensor.tensor_split(dist.get_world_size())
    sent_by_the_small_one = []
    for step in ring_messages(tensor):
        sent_by_the_small_one.append(plain(chunks[step.sent]))
    sums = plain(tensor)
    with observed() as traffic:
        traffic.note = check_neighbour
        ring_all_reduce = load_name(path, "ring_all_reduce")
        tensor = numbers_of(rank, size)
        ring_all_reduce(tensor)
    sends = [message for message in traffic.messages if message.name == "isend"]
    return {
        "after": plain(tensor),
        "sums": sums,
        "sent": [plain(message.sent.flatten()) for message in sends],
        "to_be_sent": sent_by_the_small_one,
    }


def finding(results: list[dict]) -> str | None:
    world_size = len(results)
    after = [result["after"] for result in results]
    sums = results[0]["sums"]
    if not near(after, [sums] * world_size):
        title = wrong_message(results) or (
            "all messages were right, but the sums are not in `tensor`: write each into its chunk, which is a view of"
            " it (chunk += arrived, chunk.copy_(arrived); chunk + arrived is a new tensor), and do not divide"
        )
        return side_by_side(f"{title}\n    these are the tensors after the call:", after, they_should_be=sums)
    sent = [sum(map(len, result["sent"])) for result in results]
    # Each rank sends W - 1 chunks in each half, and no chunk has more than a W-th of the numbers, rounded up.
    most = 2 * (world_size - 1) * math.ceil(len(sums) / world_size)
    if max(sent) > most:
        title = "the sums are right, but more was sent than in a ring with chunks; the numbers sent:"
        return side_by_side(title, sent, at_most=most)
    return None


def wrong_message(results: list[dict]) -> str | None:
    """A finding about the first message that is not the one of the small ring."""
    half = len(results) - 1
    for step in range(2 * half):
        for rank, result in enumerate(results):
            sent = result["sent"][step] if step < len(result["sent"]) else None
            expected = result["to_be_sent"][step]
            if not near(sent, expected):
                return (
                    f"message {step + 1} of rank {rank} is {shown(sent)}, and should be {shown(expected)}:"
                    f" {RULES[step // half]}"
                )
    return None
