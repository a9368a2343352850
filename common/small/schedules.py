"""Pipeline schedules: the order in which a stage computes the micro-batches of a step, and who waits when.

`all_forward_first` is the obvious one: it keeps the activations of all micro-batches until backward begins.
`one_forward_one_backward` (1F1B) waits as long, and keeps those of fewer micro-batches.

Sources: Huang et al., GPipe, 2018; Narayanan et al., PipeDream, 2019.
"""

from collections.abc import Callable
from typing import NamedTuple


class Action(NamedTuple):
    """A computation of a rank: "forward" or "backward", of the micro-batch of this number."""

    kind: str
    micro_batch: int


# The actions of a rank in their order, from the rank, the world size and the number of micro-batches.
Schedule = Callable[[int, int, int], list[Action]]


def all_forward_first(rank: int, world_size: int, micro_batches: int) -> list[Action]:
    """GPipe's schedule, which is the same for every rank."""
    forwards = [Action("forward", number) for number in range(micro_batches)]
    backwards = [Action("backward", number) for number in range(micro_batches)]
    return forwards + backwards


def one_forward_one_backward(rank: int, world_size: int, micro_batches: int) -> list[Action]:
    """PipeDream's schedule, with one optimizer step for all micro-batches: a backward as soon as it is possible."""
    # The last stage can begin with backward after one forward; each stage before it is one forward further ahead.
    ahead = min(world_size - 1 - rank, micro_batches)
    actions = [Action("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:  # a forward is left
            actions.append(Action("forward", ahead + number))
        actions.append(Action("backward", number))
    return actions


class Timeline(NamedTuple):
    """A step of all ranks, if a forward takes one unit of time, a backward two, and a message none.

    Attributes:
        slots: for each rank, what it computes in each unit of time; None where it waits.
        kept: for each rank, the largest number of micro-batches whose activations it holds at a time.
    """

    slots: list[list[Action | None]]
    kept: list[int]

    @property
    def bubble(self) -> float:
        """The fraction of the time in which a rank waits; it is the same for every rank."""
        return self.slots[0].count(None) / len(self.slots[0])

    def __str__(self) -> str:
        lines = []
        for rank, slots in enumerate(self.slots):
            cells = ["·" if action is None else f"{action.kind[0].upper()}{action.micro_batch}" for action in slots]
            lines.append(f"rank {rank}  " + "".join(f"{cell:3}" for cell in cells).rstrip())
        return "\n".join(lines)


def timeline(schedule: Schedule, world_size: int, micro_batches: int) -> Timeline:
    """The step of all ranks. Each rank in turn goes as far as the messages for it allow, until all are done."""
    schedules = [schedule(rank, world_size, micro_batches) for rank in range(world_size)]
    left = [list(actions) for actions in schedules]
    slots: list[list[Action | None]] = [[] for _ in range(world_size)]
    done: dict[tuple[int, Action], int] = {}  # when a rank has ended an action
    while any(left):
        num_done = len(done)
        for rank in range(world_size):
            while left[rank]:
                action = left[rank][0]
                # A rank needs a message first. There is no sender before the first rank and after the last.
                sender = rank - 1 if action.kind == "forward" else rank + 1
                if 0 <= sender < world_size and (sender, action) not in done:
                    break
                left[rank].pop(0)
                start = done.get((sender, action), 0)  # 0 where there is no sender to wait for
                waiting = max(0, start - len(slots[rank]))
                slots[rank] += [None] * waiting
                slots[rank] += [action] * (1 if action.kind == "forward" else 2)
                done[rank, action] = len(slots[rank])
        if len(done) == num_done:
            waiting_ranks = [rank for rank in range(world_size) if left[rank]]
            raise ValueError(f"ranks {waiting_ranks} wait for messages that never come")
    end = max(done.values())
    for row in slots:
        row += [None] * (end - len(row))
    return Timeline(slots, [_most_kept(actions) for actions in schedules])


def _most_kept(actions: list[Action]) -> int:
    kept = 0
    most = 0
    for action in actions:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most
