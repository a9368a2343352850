"""A ring all-reduce of four ranks, message by message with its numbers.

The numbers are those of four processes that run `common.small.ring`. Rank 0 has ones, rank 1 tens, rank 2 hundreds and
rank 3 thousands, so each sum says whose numbers are in it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from common.process_group import process_group
from common.processes import ranks
from common.small.ring import ring_messages

RANKS = 4
START = [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]]  # by rank and part


class State(NamedTuple):
    """The numbers of all ranks after a message, and what the message was.

    Attributes:
        half: "start", "reduce-scatter" or "all-gather".
        numbers: by rank and part.
        sent, received: the part that each rank has sent to the right and received from the left; empty at the start.
    """

    half: str
    numbers: list[list[int]]
    sent: list[int]
    received: list[int]


def trace() -> list[State]:
    """The states of a ring all-reduce of START, from four processes that carry it out."""
    by_rank = ranks(RANKS).run(_numbers_of_this_rank)
    states = [State("start", START, [], [])]
    for of_a_message in zip(*by_rank, strict=True):
        half = of_a_message[0][0].half
        sent = [message.sent for message, _ in of_a_message]
        received = [message.received for message, _ in of_a_message]
        states.append(State(half, [numbers for _, numbers in of_a_message], sent, received))
    return states


def _numbers_of_this_rank() -> list:
    """This rank's messages, each with its numbers afterwards."""
    with process_group():
        numbers = torch.tensor(START[dist.get_rank()])
        return [(message, numbers.tolist()) for message in ring_messages(numbers)]


def text(states: list[State]) -> str:
    """All states, one below the other."""
    blocks = []
    for number, state in enumerate(states):
        lines = [title(number, state)]
        for rank, numbers in enumerate(state.numbers):
            line = f"  rank {rank}  " + "".join(f"{value:>6}" for value in numbers)
            lines.append(f"{line}   {action(state, rank)}".rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def title(number: int, state: State) -> str:
    if state.half == "start":
        return "Before: each rank has four parts"
    if state.half == "reduce-scatter":
        return f"Message {number}, reduce-scatter: receive a part and add it to your own"
    return f"Message {number}, all-gather: receive a sum and keep it"


def action(state: State, rank: int) -> str:
    if state.half == "start":
        return ""
    return f"rank {rank} sends part {state.sent[rank]} to rank {(rank + 1) % RANKS}"
