"""`Record.epochs` and `collectives`: ranks wait for each other, because one has more batches or other collectives."""

from collections import defaultdict

from common.doctor.answers import Finding
from common.doctor.checks.alignment import first_uneven
from common.doctor.record import Call, Record

IF_IT_WORKS = "If a line works, raise --time-out"


def why_ranks_wait(records: list[Record], positions: str) -> Finding:
    """The finding where no rank has an error of its own; `positions` says where each rank is."""
    # Uneven epochs come first: they also make the collectives differ, and explain it.
    uneven = first_uneven(record.training_epochs for record in records)
    if uneven and not any(record.has_joined for record in records):
        text = f"{positions}; in epoch {uneven.number} {uneven.counts}"
        return Finding(text, "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    uneven = first_uneven(record.evaluations for record in records)
    if uneven and any(record.is_sharded for record in records):
        text = f"{positions}; in evaluation {uneven.number} {uneven.counts}"
        advice = "give all ranks equally many batches: each forward gathers the sharded parameters"
        return Finding(text, advice, pitfall="uneven_evaluation")
    missing = calls_of_some_ranks(records)
    calls = [f"{call.name} in {call.line} was called by {callers} alone" for call, callers in missing.items()]
    text = "; ".join([positions, *calls[:3]])
    if len(calls) == 1:
        advice = "let all ranks call it, and rank 0 print; if all do, let them leave the loop before it at one step"
        return Finding(text, f"{advice}. {IF_IT_WORKS}", pitfall="collective_on_rank_0")
    evaluations = [len(record.evaluations) for record in records]
    if not calls and len(set(evaluations)) > 1:
        text = f"{text}; the ranks have begun {', '.join(map(str, evaluations))} evaluations"
        advice = "evaluate on all ranks, or by `model.module`: a forward of DDP may send buffers to the other ranks"
        if any(record.is_sharded for record in records):
            advice = "evaluate on all ranks: each forward gathers the sharded parameters"
        return Finding(text, f"{advice}. {IF_IT_WORKS}", pitfall="collective_on_rank_0")
    return Finding(text, f"see what each line waits for: ranks must leave a loop at one step. {IF_IT_WORKS}")


def calls_of_some_ranks(records: list[Record]) -> dict[Call, str]:
    """The calls, each a collective in a line, that not all ranks have made, and who has: "rank 0, rank 2"."""
    callers: dict[Call, list[str]] = defaultdict(list)
    for record in records:
        for call in record.collectives:
            callers[call].append(f"rank {record.rank}")
    return {call: ", ".join(ranks) for call, ranks in callers.items() if len(ranks) < len(records)}
