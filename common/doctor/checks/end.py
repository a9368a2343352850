"""`Record.end` and `collectives`: a rank has crashed, or ranks wait for each other, mostly in different collectives."""

from collections import Counter

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import across_ranks, evaluations, training_epochs, uneven_epoch
from common.doctor.record import Call, Record

MAX_ERROR = 300  # characters, after which the text of an error is cut
# Parts of the error of a rank whose partner has left or has called another collective. torch's threads abort the
# process (SIGABRT). An error of gloo is a RuntimeError, as many errors of a script are, but it names its source file.
OF_COMMUNICATION = ("SIGABRT", "DistBackendError", "DistNetworkError", "DistStoreError", "third_party/gloo/")
UNUSED = "parameters that were not used in producing loss"  # a part of DistributedDataParallel's error
WHAT_TO_SEE = "see what each line waits for: ranks must leave a loop at one step. If a line works, raise --time-out"


def check_end(records: list[Record], patience: float) -> Answer:
    """The answer about the end, where ranks that made no progress for `patience` seconds were stopped."""
    reasons = [record.end.reason for record in records]
    if "crash" in reasons or "stopped" in reasons:
        record = rank_with_own_error(records)
        return _waiting(records, patience) if record is None else _crashed(record)
    if "steps" in reasons:
        return NotExamined(f"ended after {len(records[0].steps)} steps, as --steps asked")
    return Right()


def rank_with_own_error(records: list[Record]) -> Record | None:
    """The first rank that has crashed by an error of its own; None if there is none.

    rank 0        rank 1         the own error
    ValueError    gloo's error   rank 0's
    RuntimeError  gloo's error   rank 0's
    has ended     gloo's error   none: rank 1 was left alone
    SIGABRT       gloo's error   none: they have called different collectives
    """
    for record in records:
        has_lost_another = any(part in record.end.text for part in OF_COMMUNICATION)
        if record.end.reason == "crash" and not has_lost_another:
            return record
    return None


def _crashed(record: Record) -> Finding:
    text = f"rank {record.rank} crashed after {len(record.steps)} optimizer steps: {record.end.text[:MAX_ERROR]}"
    if UNUSED not in record.end.text:
        return Finding(text, "mend the error, and call the doctor again")
    return Finding(
        f"{text}; DistributedDataParallel waits for the gradients of parameters that the forward does not use",
        "freeze or remove them before wrapping, or let DDP look for them with find_unused_parameters=True",
        pitfall="unused_parameter",
    )


def _waiting(records: list[Record], patience: float) -> Finding:
    where = ", ".join(map(_where, records))
    if not any(record.end.reason == "crash" for record in records):
        where = f"no rank made progress for {patience:g} s: {where}"
    # Uneven epochs come first: they also make the collectives differ, and explain it.
    uneven = uneven_epoch(map(training_epochs, records))
    if uneven is not None:
        text = f"{where}; in epoch {uneven.number} {uneven.batches_by_rank()}"
        return Finding(text, "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    uneven = uneven_epoch(map(evaluations, records))
    if uneven is not None and any(record.is_sharded for record in records):
        text = f"{where}; in evaluation {uneven.number} {uneven.batches_by_rank()}"
        advice = "give all ranks equally many batches: each forward gathers the sharded parameters"
        return Finding(text, advice, pitfall="uneven_evaluation")
    own = own_calls(records)
    if not own:
        return Finding(where, WHAT_TO_SEE)
    alone = [f"rank {rank} alone has called {call.name} in {call.line}" for rank, call in own.items()]
    text = f"{where}; {', '.join(alone)}"
    if len(own) == 1:
        return Finding(text, "let all ranks call it, and rank 0 print", pitfall="collective_on_rank_0")
    return Finding(text, WHAT_TO_SEE)


def _where(record: Record) -> str:
    if record.end.reason == "crash":
        return f"rank {record.rank} could not communicate ({record.end.text[:MAX_ERROR]})"
    if record.end.reason == "stopped":
        where = f"is in {record.waits_in}" if record.waits_in else "was stopped outside of the script"
        return f"rank {record.rank} {where}"
    return f"rank {record.rank} has ended"


def own_calls(records: list[Record]) -> dict[int, Call]:
    """For each rank that has called a collective in a line where no other rank has called it: the first such call.

    Call n of all ranks has been answered if every rank has made call n + 1:

        call   rank 0                  rank 1
        1      broadcast in t.py:1     broadcast in t.py:2    answered: these are the branches of an `if`
        2      all_reduce in t.py:3    barrier in t.py:4      not answered: the all_reduce is rank 0's own call
        3      barrier in t.py:4
    """
    answered = across_ranks(record.collectives for record in records)[:-1]
    callers: Counter[Call] = Counter()  # the number of ranks with each call
    for record in records:
        callers.update(set(record.collectives))
    branches: set[Call] = set()
    for calls in answered:
        has_one_name = len({call.name for call in calls}) == 1
        if has_one_name and all(callers[call] < len(records) for call in calls):
            branches.update(calls)
    own: dict[int, Call] = {}
    for record in records:
        for call in record.collectives:
            if callers[call] == 1 and call not in branches:
                own.setdefault(record.rank, call)
    return own
