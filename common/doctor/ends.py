"""The check of the end: a rank that crashed, or ranks that wait for each other."""

from itertools import zip_longest

from common.doctor.answers import Answer, Finding, Unseen
from common.doctor.compare_data import training_passes
from common.doctor.record import Record

# What a rank says whose partner has gone, or does something else.
LEFT_ALONE = ("Timed out", "timeout", "Connection closed by peer", "Connection reset by peer", "gloo", "NCCL")
UNFINISHED = "finished reduction in the prior iteration"


def end(records: list[Record], patience: float) -> Answer:
    crashes = {}
    for record in records:
        message = record.crash or ""
        if record.ended is None and record.code != 0:  # without a last word: a signal, or os._exit
            message = f"exit code {record.code}"
        if message.startswith("exit code"):
            message += f"; last printed: {record.last_line}"
        if message:
            crashes[record.rank] = message
    for rank, message in crashes.items():
        if not any(sign in message for sign in LEFT_ALONE):  # no other rank has caused it
            return _crashed(message, records[rank])
    if crashes or any(record.ended == "stopped" for record in records):
        return _waiting(records, set(crashes), patience)
    if any(record.ended == "steps" for record in records):
        return Unseen(f"ended after {records[0].steps} steps, as wished")
    return None


def _crashed(message: str, record: Record) -> Finding:
    crashed = f"rank {record.rank} crashed after {record.steps} optimizer steps"
    if UNFINISHED not in message:
        return Finding(f"{crashed}: {message[:300]}", "mend the error, and call the doctor again")
    unused = [name for model in record.models for name in model.without_gradient]
    parameters = sum(model.parameters for model in record.models if model.forwards)
    return Finding(
        f"{crashed}: DDP waits for the gradients of {len(unused)} of {parameters} parameters, which the forward does "
        f"not use ({', '.join(unused[:3])})",
        "freeze or remove them before wrapping, or let DDP look for them with find_unused_parameters=True",
        pitfall="unused_parameter",
    )


def _waiting(records: list[Record], crashed: set[int], patience: float) -> Finding:
    places = []
    for record in records:
        if record.rank in crashed:
            places.append(f"rank {record.rank} was left alone")
        elif record.place:
            line, *called = record.place
            places.append(f"rank {record.rank} is in {line} ({called[0] if called else 'Python'})")
        else:
            places.append(f"rank {record.rank} has ended")
    text = ", ".join(places)
    if not crashed:
        text = f"no rank got on for {patience:g} s: {text}"
    uneven = _uneven_passes(records)
    if uneven:
        return Finding(f"{text}; {uneven}", "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    for number, calls in enumerate(zip_longest(*(record.collectives for record in records)), 1):
        if len(set(calls)) > 1:
            different = [f"rank {rank} {' in '.join(call or ['none'])}" for rank, call in enumerate(calls)]
            text = f"{text}; collective {number} of the script: {', '.join(different)}"
            if calls[0] is not None and calls[0] not in calls[1:]:
                return Finding(text, "let all ranks call it, and rank 0 print", pitfall="collective_on_rank_0")
            break
    return Finding(text, "see what each of these lines waits for: all ranks must leave a loop at one step")


def _uneven_passes(records: list[Record]) -> str | None:
    of_ranks = [training_passes(record) for record in records]
    for epoch, passes in enumerate(zip(*of_ranks, strict=False)):
        shortest = min(passes, key=lambda one: one.batches)
        if shortest.complete and any(one.batches > shortest.batches for one in passes):
            batches = [f"rank {rank} has {one.batches}" for rank, one in enumerate(passes)]
            return f"of the batches of epoch {epoch} {', '.join(batches)}"
    return None
