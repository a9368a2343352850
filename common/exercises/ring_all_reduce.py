"""The checker of `ring_all_reduce`: what was sent to whom, message by message, and which sums came out."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from common.exercises.compare import near, plain, scaled, shown, side_by_side
from common.exercises.stage import SolutionFailed, load_name
from common.exercises.traffic import Message, observed
from common.process_group import COLLECTIVES
from common.small.ring import ring_messages

MINUTES = 40
READ = "02_ddp_raw/README.md"
SAME_AS = "the small ring (common/small/ring.py), with as few numbers on each link"
WORLD_SIZES = (3, 2)
WHY_IT_HANGS = (
    "if all ranks are in recv, nobody has sent yet, and if all are in send, or wait for it, nobody receives: begin to"
    " send by isend, then receive, and wait for the send after that. Each message is sent by one rank and received by"
    " its right neighbour"
)
CASES = {
    "6 numbers on {}": {"size": 6},
    "7 numbers on {}": {"size": 7},
}  # on three ranks chunks are equal, and 3, 2 and 2


def numbers_of(rank: int, size: int) -> Tensor:
    """Numbers whose sums say whose they are: 1, 2, 3 … of rank 0, 10, 20, 30 … of rank 1, and so on."""
    return torch.arange(1, size + 1).double() * 10**rank


def check_neighbour(message: Message) -> None:
    """Raise SolutionFailed if a message goes to, or comes from, anybody but the neighbour."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if message.name in COLLECTIVES:
        raise SolutionFailed(
            f"dist.{message.name} was called: build the all-reduce from sends and receives of two ranks each"
        )
    peer_names = ("dst", "group_dst") if message.name == "isend" else ("src", "group_src")
    peers = [message.arguments[name] for name in peer_names if message.arguments.get(name) is not None]
    neighbour = (rank + 1) % world_size if message.name == "isend" else (rank - 1) % world_size
    if peers not in ([neighbour], []):  # without a source a message of any rank is received
        raise SolutionFailed(
            f"the {message.name} of rank {rank} is to, or from, rank {peers[0]}: in a ring each rank sends to its right"
            " neighbour only, (rank + 1) % world size, and receives from its left one, (rank - 1) % world size"
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
        "own": plain(numbers_of(rank, size)),
        "after": plain(tensor),
        "sums": sums,
        "sent": [plain(message.sent.flatten()) for message in sends],
        "to_be_sent": sent_by_the_small_one,
    }


def finding(results: list[dict]) -> str | None:
    world_size = len(results)
    after = [result["after"] for result in results]
    sums = results[0]["sums"]
    if near(after, [sums] * world_size):
        return too_much_sent(results)
    own = [result["own"] for result in results]
    title = wrong_message(results)
    if near(after, [scaled(sums, 1 / world_size)] * world_size):
        title = "these are the means over the ranks, and the sums were asked for: do not divide"
    elif title is None:
        title = (
            "all messages were right, but the sums are not in `tensor`. A chunk is a view of it, so write into the"
            " chunk: chunk += arrived in the first half, chunk.copy_(arrived) in the second. chunk + arrived is a new"
            " tensor"
        )
    brings = ", ".join(f"rank {rank} brings {shown(of_rank)}" for rank, of_rank in enumerate(own))
    return side_by_side(f"{title}\n    {brings}; these are the tensors after the call:", after, they_should_be=sums)


def wrong_message(results: list[dict]) -> str | None:
    """A finding about the first message that is not the one of the small ring."""
    world_size = len(results)
    steps = 2 * (world_size - 1)
    for step in range(steps):
        for rank, result in enumerate(results):
            expected = result["to_be_sent"][step]
            if len(result["sent"]) <= step:
                return (
                    f"rank {rank} has sent {len(result['sent'])} messages, of {steps}: each half of the ring, the"
                    " reduce-scatter and then the all-gather, has W - 1 steps, and in each a rank sends a chunk"
                )
            sent = result["sent"][step]
            if not near(sent, expected):
                return (
                    f"message {step + 1} of rank {rank} is {shown(sent)}, and should be {shown(expected)}:"
                    f" {rule(step, world_size, sent, result['own'])}"
                )
    return None


def rule(step: int, world_size: int, sent: list[float], own: list[float]) -> str:
    """What the task says about the message of a step, counted from 0."""
    chunk_sizes = [len(chunk) for chunk in torch.empty(len(own)).tensor_split(world_size)]
    if len(sent) not in chunk_sizes:
        return (
            f"cut the {len(own)} numbers into {world_size} chunks of {shown(chunk_sizes)}, as tensor_split does, and"
            " send one in each step"
        )
    if step == 0:
        return "the first step sends the chunk whose number is the rank's"
    if step < world_size:
        return (
            "in the first half a rank receives into a tensor of its own, such as torch.empty_like(chunk), and adds it"
            " to its chunk of the same number, in place (chunk += arrived; chunk + arrived is a new tensor). In the"
            " next step it sends this chunk, whose number is one lower. At the end the chunk (rank + 1) % world size is"
            " finished, and with this one, not with the chunk of its own number, the second half begins"
        )
    return "in the second half a chunk that arrives is finished: copy it, do not add it, and send it in the next step"


def too_much_sent(results: list[dict]) -> str | None:
    """A finding about how many numbers each rank has sent."""
    world_size = len(results)
    size = len(results[0]["sums"])
    sent = [sum(map(len, result["sent"])) for result in results]
    # Each rank sends W - 1 chunks in each half, and no chunk has more than a W-th of the numbers, rounded up.
    most = 2 * (world_size - 1) * math.ceil(size / world_size)
    if max(sent) <= most:
        return None
    title = (
        f"the sums are right, but more was sent than in a ring with chunks: in each of the {2 * (world_size - 1)} steps"
        f" a rank sends one of the {world_size} chunks into which the {size} numbers are cut; the numbers sent:"
    )
    return side_by_side(title, sent, at_most=most)
