"""Collectives: all ranks call the same ones in one order. Else a rank waits for ever, or loses the others."""

import functools
import inspect
import sys
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

from common.doctor.checks.alignment import first_uneven
from common.doctor.checks.epochs import evaluations, is_evaluation, training_epochs
from common.doctor.record import Call, Record
from common.doctor.recorder import Recorder
from common.doctor.results import Finding
from common.process_group import COLLECTIVES

IF_IT_WORKS = "If a line works, raise --time-out"


class CollectiveObserver:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def install(self) -> None:
        for name in (*COLLECTIVES, "barrier", "monitored_barrier"):
            before = functools.partial(self.before_collective, name, inspect.signature(getattr(dist, name)))
            self._recorder.wrap(dist, name, before=before)
        self._recorder.wrap(Join, "__enter__", before=self.before_join)
        self._recorder.wrap(dist, "destroy_process_group", before=self.before_end_of_group)

    def before_collective(self, name: str, parameters: inspect.Signature, *args: Any, **kwargs: Any) -> None:
        arguments = parameters.bind(*args, **kwargs).arguments
        if not dist.is_initialized() or arguments.get("group") not in (None, dist.group.WORLD):
            return
        record = self._recorder.record
        sizes = [value.numel() for value in arguments.values() if isinstance(value, Tensor)]
        record.exchanged[len(record.steps)] += max(sizes, default=0)
        call = Call(name, self._recorder.script_line(sys._getframe()) or "?")
        if "gather" in name and record.epochs:
            record.epochs[-1].gathers = True
        if call not in record.collectives:
            record.collectives[call] = None
            self._recorder.write()  # this very call may abort the process

    def before_join(self, *args: Any) -> None:
        self._recorder.record.has_joined = True

    def before_end_of_group(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.write()  # the backend, which is known only while there is a group


def judge_wait(records: list[Record], positions: str) -> Finding:
    """The finding where no rank has an error of its own: by the first cause that the records show."""
    return (
        judge_uneven_training(records, positions)  # first, because it also makes the collectives differ
        or judge_uneven_evaluation(records, positions)
        or judge_evaluation_of_some_ranks(records, positions)
        or judge_calls_of_some_ranks(records, positions)
    )


def judge_uneven_training(records: list[Record], positions: str) -> Finding | None:
    uneven = first_uneven(map(training_epochs, records))
    if uneven is None or any(record.has_joined for record in records):
        return None
    text = f"{positions}; in epoch {uneven.number} {uneven.counts}"
    return Finding(text, "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")


def judge_uneven_evaluation(records: list[Record], positions: str) -> Finding | None:
    uneven = first_uneven(map(evaluations, records))
    if uneven is None:
        return None
    text = f"{positions}; in evaluation {uneven.number} {uneven.counts}"
    advice = f"give all ranks equally many batches: {why_evaluations_wait(records)}"
    if any(record.is_sharded for record in records):
        return Finding(text, advice, pitfall="uneven_evaluation")
    is_cause = any(map(is_evaluating, records)) and not possible_causes(records)
    return Finding(text, advice) if is_cause else None


def judge_evaluation_of_some_ranks(records: list[Record], positions: str) -> Finding | None:
    begun = [len(evaluations(record)) for record in records]
    if len(set(begun)) == 1 or possible_causes(records):
        return None
    if calls_of_some_ranks(records) and not any(map(waits_in_forward, records)):
        return None
    text = f"{positions}; the ranks have begun {', '.join(map(str, begun))} evaluations"
    advice = f"evaluate on all ranks: {why_evaluations_wait(records)}. {IF_IT_WORKS}"
    return Finding(text, advice, pitfall="collective_on_rank_0")


def judge_calls_of_some_ranks(records: list[Record], positions: str) -> Finding:
    callers = calls_of_some_ranks(records)
    calls = possible_causes(records) or list(callers)
    named = [f"{call.name} in {call.line} was called by {', '.join(callers[call])} alone" for call in calls[:3]]
    text = "; ".join([positions, *named])
    if len(calls) == 1:
        advice = "let all ranks call it, and rank 0 print; if all do, let them leave the loop before it at one step"
        return Finding(text, f"{advice}. {IF_IT_WORKS}", pitfall="collective_on_rank_0")
    return Finding(text, f"see what each line waits for: ranks must leave a loop at one step. {IF_IT_WORKS}")


def why_evaluations_wait(records: list[Record]) -> str:
    if any(record.is_sharded for record in records):
        return "each forward gathers the sharded parameters"
    return "the script or a forward of DDP may communicate in each batch, and one by `model.module` does not"


def is_evaluating(record: Record) -> bool:
    return bool(record.epochs) and is_evaluation(record.epochs[-1]) and not record.epochs[-1].complete


def waits_in_forward(record: Record) -> bool:
    """True if the rank waits in an evaluation, but in no collective that the script calls: so the forward calls it."""
    return is_evaluating(record) and all(record.waits_in != call.line for call in record.collectives)


def calls_of_some_ranks(records: list[Record]) -> dict[Call, list[str]]:
    """The calls, each a collective in a line, that not all ranks have made, and who has: ["rank 0", "rank 2"]."""
    callers: dict[Call, list[str]] = defaultdict(list)
    for record in records:
        for call in record.collectives:
            callers[call].append(f"rank {record.rank}")
    return {call: ranks for call, ranks in callers.items() if len(ranks) < len(records)}


def possible_causes(records: list[Record]) -> list[Call]:
    """Those of the calls of some ranks that may be why all wait. The calls of one collective are left out if

    - all ranks have made equally many, as in the branches of `if rank == 0: barrier()`, `else: barrier()`, or
    - a rank waits in each of them, which another rank does not reach because of another call, or of an evaluation.
    """
    of_some_ranks = calls_of_some_ranks(records)
    waiting = {record.waits_in for record in records}
    causes: list[Call] = []
    for name in dict.fromkeys(call.name for call in of_some_ranks):
        calls = [call for call in of_some_ranks if call.name == name]
        counts = {sum(call in record.collectives for call in calls) for record in records}
        if len(counts) > 1 and any(call.line not in waiting for call in calls):
            causes += calls
    return causes
