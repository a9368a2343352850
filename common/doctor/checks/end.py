"""The script's end: a rank has crashed, or ranks wait for each other, mostly in different collectives."""

from collections.abc import Callable
from itertools import zip_longest

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import across_ranks, evaluations, training_epochs
from common.doctor.record import Call, Epoch, Record

MAX_ERROR = 300  # characters, after which the text of an error is cut
# Errors of a rank whose partner has left or has called another collective. torch's threads abort the process (SIGABRT).
OF_COMMUNICATION = ("SIGABRT", "DistBackendError", "DistNetworkError", "DistStoreError")
UNUSED = "parameters that were not used in producing loss"  # in the error of DistributedDataParallel
WHAT_TO_SEE = "see what each line waits for: ranks must leave a loop at one step. If a line works, raise --time-out"


def check_end(records: list[Record], patience: float) -> Answer:
    """The answer about the end, where ranks that made no progress for `patience` seconds were stopped."""
    record = rank_with_own_error(records)
    if record is not None:
        return _crashed(record)
    reasons = [record.end.reason for record in records]
    if "crash" in reasons or "stopped" in reasons:
        return _waiting(records, patience)
    if "steps" in reasons:
        return NotExamined(f"ended after {len(records[0].steps)} steps, as --steps asked")
    return Right()


def rank_with_own_error(records: list[Record]) -> Record | None:
    """The rank whose own error has ended the script; None if no rank has crashed but by the loss of another one.

        rank 0                 rank 1                     the own error
        ValueError             RuntimeError               rank 0's
        RuntimeError, earlier  RuntimeError, later        rank 0's
        has ended, earlier     RuntimeError, later        none: rank 1 was left alone
        SIGABRT                RuntimeError               none: they have called different collectives

    With gloo the error of a rank that is left alone is a plain RuntimeError, as many errors of a script are. So the
    order decides: the first rank to go was not left alone.
    """
    crashed = [record for record in records if record.end.reason == "crash"]
    for record in crashed:
        if record.end.error not in (*OF_COMMUNICATION, "RuntimeError"):
            return record
    if any(record.end.error in OF_COMMUNICATION for record in crashed) or _uneven_epoch(records, training_epochs):
        return None
    gone = [record for record in records if record.end.time is not None]
    first = min(gone, key=lambda record: record.end.time, default=None)
    return first if first in crashed else None


def _crashed(record: Record) -> Finding:
    error = record.end.error_line()[:MAX_ERROR]
    text = f"rank {record.rank} crashed after {len(record.steps)} optimizer steps: {error}"
    if UNUSED not in record.end.message:
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
    for cause in (_uneven_training, _uneven_evaluation, _different_collectives):
        finding = cause(records, where)
        if finding is not None:
            return finding
    return Finding(where, WHAT_TO_SEE)


def _uneven_training(records: list[Record], where: str) -> Finding | None:
    uneven = _uneven_epoch(records, training_epochs)
    if uneven is None:
        return None
    advice = "give all ranks equally many batches, or use Join"
    return Finding(f"{where}; in epoch {uneven}", advice, pitfall="uneven_inputs")


def _uneven_evaluation(records: list[Record], where: str) -> Finding | None:
    uneven = _uneven_epoch(records, evaluations)
    is_sharded = any(network.is_sharded for record in records for network in record.networks)
    if uneven is None or not is_sharded:
        return None
    advice = "give all ranks equally many batches: each forward gathers the sharded parameters"
    return Finding(f"{where}; in evaluation {uneven}", advice, pitfall="uneven_evaluation")


def _different_collectives(records: list[Record], where: str) -> Finding | None:
    calls = _first_different_calls(records)
    if not calls:
        return None
    by_rank = []
    for rank, call in enumerate(calls):
        by_rank.append(f"rank {rank} {call.name} in {call.line}" if call else f"rank {rank} none")
    text = f"{where}; the first collective that is not the same: {', '.join(by_rank)}"
    if calls[0] is not None and calls[0] not in calls[1:]:
        return Finding(text, "let all ranks call it, and rank 0 print", pitfall="collective_on_rank_0")
    return Finding(text, WHAT_TO_SEE)


def _where(record: Record) -> str:
    end = record.end
    if end.reason == "crash":
        return f"rank {record.rank} was left alone ({end.error_line()[:MAX_ERROR]})"
    if end.line:
        return f"rank {record.rank} is in {end.line}"
    return f"rank {record.rank} has ended"


def _uneven_epoch(records: list[Record], epochs_of: Callable[[Record], list[Epoch]]) -> str | None:
    """The first epoch that has ended on one rank and goes on on another one, such as "0 rank 0 has 4 batches, …"."""
    for number, epochs in enumerate(across_ranks(map(epochs_of, records))):
        shortest = min(epochs, key=lambda epoch: epoch.batches)
        if shortest.complete and any(epoch.batches > shortest.batches for epoch in epochs):
            batches = [f"rank {rank} has {epoch.batches} batches" for rank, epoch in enumerate(epochs)]
            return f"{number} {', '.join(batches)}"
    return None


def _first_different_calls(records: list[Record]) -> tuple[Call | None, ...]:
    """The first collective that is not the same on all ranks; None for a rank that has called no more."""
    for calls in zip_longest(*[record.collectives for record in records]):
        if len(set(calls)) > 1:
            return calls
    return ()
