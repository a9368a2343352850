"""The check of the end: a rank that crashed, or ranks that wait for each other."""

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.compare_calls import different_collective
from common.doctor.compare_data import training_passes
from common.doctor.launch import Rank
from common.doctor.record import Record

# What a rank says whose partner has gone, or does something else.
LEFT_ALONE = ("Timed out", "timeout", "Connection closed by peer", "Connection reset by peer", "gloo", "NCCL")
NEEDED = "The ranks need each other: one that stands still stops all."
UNFINISHED = "finished reduction in the prior iteration"


def end(ranks: list[Rank], patience: float) -> Answer:
    crashes = {rank.record.rank: _crash(rank) for rank in ranks if _crash(rank)}
    for rank, message in crashes.items():
        if not any(sign in message for sign in LEFT_ALONE):  # no other rank has caused it
            return _crashed(message, ranks[rank].record)
    if crashes or any(rank.hung for rank in ranks):
        return _waiting([rank.record for rank in ranks], set(crashes), patience)
    if any(rank.record.ended == "steps" for rank in ranks):
        return Unseen(f"it was ended after {ranks[0].record.steps} optimizer steps")
    return Healthy(f"reached by {len(ranks)} ranks")


def _crash(rank: Rank) -> str:
    crash = rank.record.crash or ""
    if rank.record.ended is None and rank.code != 0:  # without a last word: a signal, or os._exit
        crash = f"exit code {rank.code}"
    if crash.startswith("exit code"):
        crash += f"; last printed: {rank.last_line}"
    return crash


def _crashed(message: str, record: Record) -> Finding:
    crashed = f"rank {record.rank} crashed after {record.steps} optimizer steps"
    if UNFINISHED not in message:
        return Finding(f"{crashed}: {message[:300]}", "mend the error, and call the doctor again", why=NEEDED)
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
    left = _left_training(records)
    if left:
        advice = "let all ranks leave the loop at one step: reduce over the ranks what decides it"
        return Finding(f"{text}; {left}", advice, why="A rank left the training earlier than another one.")
    different = different_collective(records, lines=True)
    if different:
        return Finding(f"{text}; {different.text}", different.advice, different.pitfall, different.why)
    return Finding(text, "see what each of these lines waits for", why=NEEDED)


def _uneven_passes(records: list[Record]) -> str | None:
    of_ranks = [training_passes(record) for record in records]
    for epoch, passes in enumerate(zip(*of_ranks, strict=False)):
        shortest = min(passes, key=lambda one: one.batches)
        if shortest.complete and any(one.batches > shortest.batches for one in passes):
            batches = [f"rank {rank} has {one.batches}" for rank, one in enumerate(passes)]
            return f"of the batches of epoch {epoch} {', '.join(batches)}"
    return None


def _left_training(records: list[Record]) -> str | None:
    """The forwards of a rank that has ended, or reads other data, where another one wanted to train on."""
    forwards = [sum(model.forwards for model in record.models) for record in records]
    farthest = max(forwards)
    for record, made in zip(records, forwards, strict=True):
        passes = training_passes(record)
        reads_other_data = bool(passes) and not passes[-1].complete and record.passes[-1] is not passes[-1]
        if made < farthest and (record.ended == "whole" or reads_other_data):
            return (
                f"rank {record.rank} left the training after {made} forwards, "
                f"and rank {forwards.index(farthest)} had begun forward {farthest}"
            )
    return None
