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
    own = own_calls(records).items()
    text = "; ".join([positions, *[f"rank {rank} alone has called {call.name} in {call.line}" for rank, call in own]])
    if len(own) == 1:
        advice = "let all ranks call it, and rank 0 print; if all do, let them leave the loop before it at one step"
        return Finding(text, advice, pitfall="collective_on_rank_0")
    return Finding(text, WHAT_TO_SEE)


def _first_uneven(of_ranks: list[list[Epoch]]) -> str:
    """The first epoch with fewer batches on a rank, such as "0 rank 0 has 9 batches, …"; empty if there is none."""
    by_epoch = across_ranks(of_ranks)
    if not any(epoch.complete for epochs in by_epoch[-1:] for epoch in epochs):
        return ""  # all ranks are in the last epoch, and none waits because of one before
    for number, epochs in enumerate(by_epoch):
        if ended_with_fewer_batches(epochs):
            counts = [f"rank {rank} has {len(epoch.batches)} batches" for rank, epoch in enumerate(epochs)]
            return f"{number} {', '.join(counts)}"
    return ""


def own_calls(records: list[Record]) -> dict[int, Call]:
    """For each rank that has called a collective in a line where no other rank has called it: the first such call.

    Call n of each rank meets call n of the others. Calls that have met under one name, and returned, are branches of an
    `if`, unless one of them is called by all ranks. R1 is an all_reduce in line 1 of the script:

    rank 0    rank 1  first own call
    R1 R3 R4  R2 R3   R4, as R1 and R2 are branches
    R1 R2 R3  R2 R3   R1, which is no branch: it has met R2, but rank 0 calls R2 too
    """
    returned = across_ranks(record.collectives for record in records)[:-1]  # in the last ones a rank may wait
    callers = Counter(call for record in records for call in set(record.collectives))  # how many ranks made it
    branches: set[Call] = set()
    for calls in returned:
        has_one_name = len({call.name for call in calls}) == 1
        is_called_by_all = any(callers[call] == len(records) for call in calls)
        if has_one_name and not is_called_by_all:
            branches.update(calls)
    own: dict[int, Call] = {}
    for record in records:
        for call in record.collectives:
            if callers[call] == 1 and call not in branches:
                own.setdefault(record.rank, call)
    return own
