"""A ring all-reduce of four ranks, message by message with its numbers.

Four processes run `common.small.ring`, and each notes its numbers after every message. Rank 0 begins with ones, rank 1
with tens, rank 2 with hundreds and rank 3 with thousands, so the digits of a sum show whose numbers are in it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from common.process_group import process_group
from common.processes import ranks
from common.small.ring import ring_messages

RANKS = 4
START = [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]]  # START[rank][part]
WHAT_HAPPENS = {"reduce-scatter": "receive a part and add it to your own", "all-gather": "receive a sum and keep it"}


class State(NamedTuple):
    """The numbers of a rank after a message, the half of the algorithm, and the parts that it has sent and received."""

    half: str
    numbers: list[int]
    sent: int
    received: int


def trace() -> list[tuple[State, ...]]:
    """The states of all ranks after each message of a ring all-reduce of START, on four processes."""
    by_rank = ranks(RANKS).run(_states_of_this_rank)
    return list(zip(*by_rank, strict=True))


def _states_of_this_rank() -> list[State]:
    states = []
    with process_group():
        numbers = torch.tensor(START[dist.get_rank()])
        for message in ring_messages(numbers):
            states.append(State(message.half, numbers.tolist(), message.sent, message.received))
    return states


def text(states: list[tuple[State, ...]]) -> str:
    lines = ["Before: each rank has four parts"]
    for rank, numbers in enumerate(START):
        lines.append(_row(rank, numbers))
    for number, of_ranks in enumerate(states, start=1):
        half = of_ranks[0].half
        lines += ["", f"Message {number}, {half}: {WHAT_HAPPENS[half]}"]
        for rank, state in enumerate(of_ranks):
            action = f"rank {rank} sends part {state.sent} to rank {(rank + 1) % RANKS}"
            lines.append(f"{_row(rank, state.numbers)}   {action}")
    return "\n".join(lines) + "\n"


def _row(rank: int, numbers: list[int]) -> str:
    return f"  rank {rank}  " + "".join(f"{value:>6}" for value in numbers)
