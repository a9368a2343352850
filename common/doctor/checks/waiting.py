"""`Record.epochs` and `collectives`: ranks wait for each other, because one has more batches or other collectives."""

from collections import Counter

from common.doctor.answers import Finding
from common.doctor.checks.by_rank import across_ranks, ended_with_fewer_batches
from common.doctor.record import Call, Epoch, Record

WHAT_TO_SEE = "see what each line waits for: ranks must leave a loop at one step. If a line works, raise --time-out"


def why_ranks_wait(records: list[Record], positions: str) -> Finding:
    """The finding where no rank has an error of its own; `positions` says where each rank is."""
    # Uneven epochs come first: they also make the collectives differ, and explain it.
    uneven = _first_uneven([record.training_epochs for record in records])
    if uneven and not any(record.has_joined for record in records):
        text = f"{positions}; in epoch {uneven}"
        return Finding(text, "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    uneven = _first_uneven([record.evaluations for record in records])
    if uneven and any(record.is_sharded for record in records):
        text = f"{positions}; in evaluation {uneven}"
        advice = "give all ranks equally many batches: each forward gathers the sharded parameters"
        return Finding(text, advice, pitfall="uneven_evaluation")
    own = own_calls(records)
    if not own:
        return Finding(positions, WHAT_TO_SEE)
    alone = [f"rank {rank} alone has called {call.name} in {call.line}" for rank, call in own.items()]
    text = f"{positions}; {', '.join(alone)}"
    if len(own) == 1:
        return Finding(text, "let all ranks call it, and rank 0 print", pitfall="collective_on_rank_0")
    return Finding(text, WHAT_TO_SEE)


def _first_uneven(of_ranks: list[list[Epoch]]) -> str:
    """The first epoch with fewer batches on a rank, such as "0 rank 0 has 9 batches, …"; empty if there is none.

    If all ranks are in a later epoch, none of them waits because of that one.
    """
    by_epoch = across_ranks(of_ranks)
    if not any(epoch.complete for epochs in by_epoch[-1:] for epoch in epochs):
        return ""
    for number, epochs in enumerate(by_epoch):
        if ended_with_fewer_batches(epochs):
            counts = [f"rank {rank} has {len(epoch.batches)} batches" for rank, epoch in enumerate(epochs)]
            return f"{number} {', '.join(counts)}"
    return ""


def own_calls(records: list[Record]) -> dict[int, Call]:
    """For each rank that has called a collective in a line where no other rank has called it: the first such call."""
    callers = Counter(call for record in records for call in set(record.collectives))  # how many ranks made it
    branches = _branches(records, callers)
    own: dict[int, Call] = {}
    for record in records:
        for call in record.collectives:
            if callers[call] == 1 and call not in branches:
                own.setdefault(record.rank, call)
    return own


def _branches(records: list[Record], callers: Counter[Call]) -> set[Call]:
    """Calls that met under one name are branches of an `if`, unless one of them is called by all ranks.

    Call n of each rank meets call n of the others, and the last ones may not have returned. R1 is an all_reduce in line
    1 of the script:

    rank 0    rank 1  branches
    R1 R3 R4  R2 R3   R1 and R2, so the first own call is R4
    R1 R2 R3  R2 R3   none: R1 met R2, but rank 0 calls R2 too. The first own call is R1
    """
    branches: set[Call] = set()
    for calls in across_ranks(record.collectives for record in records)[:-1]:
        has_one_name = len({call.name for call in calls}) == 1
        is_called_by_all = any(callers[call] == len(records) for call in calls)
        if has_one_name and not is_called_by_all:
            branches.update(calls)
    return branches
