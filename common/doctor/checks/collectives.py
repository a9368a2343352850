"""Collectives: all ranks call the same ones in one order. Else a rank waits for ever, or loses the others.

Noted are the collectives that the script calls, each with the line that calls it, and how many numbers they exchange.
"""

import functools
import inspect
import sys
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

from common.doctor.checks.alignment import first_uneven
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
    """The finding where no rank has an error of its own; `positions` says where each rank is."""
    # Uneven epochs come first: they also make the collectives differ, and explain it.
    uneven = first_uneven(record.training_epochs for record in records)
    if uneven and not any(record.has_joined for record in records):
        text = f"{positions}; in epoch {uneven.number} {uneven.counts}"
        return Finding(text, "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    callers = calls_of_some_ranks(records)
    causes = possible_causes(callers, records)
    newest = [(record, record.epochs[-1]) for record in records if record.epochs]
    evaluating = [record for record, epoch in newest if epoch.is_evaluation and not epoch.complete]
    are_sharded = any(record.is_sharded for record in records)
    why = "the script or a forward of DDP may communicate in each batch, and one by `model.module` does not"
    if are_sharded:
        why = "each forward gathers the sharded parameters"
    uneven = first_uneven(record.evaluations for record in records)
    if uneven and (are_sharded or (evaluating and not causes)):
        text = f"{positions}; in evaluation {uneven.number} {uneven.counts}"
        advice = f"give all ranks equally many batches: {why}"
        return Finding(text, advice, pitfall="uneven_evaluation" if are_sharded else None)
    # In an evaluation a rank that waits in no collective of the script waits in a forward.
    in_forward = [record for record in evaluating if record.waits_in not in {call.line for call in record.collectives}]
    counts = [len(record.evaluations) for record in records]
    if len(set(counts)) > 1 and not causes and (in_forward or not callers):
        text = f"{positions}; the ranks have begun {', '.join(map(str, counts))} evaluations"
        return Finding(text, f"evaluate on all ranks: {why}. {IF_IT_WORKS}", pitfall="collective_on_rank_0")
    calls = causes or list(callers)
    named = [f"{call.name} in {call.line} was called by {', '.join(callers[call])} alone" for call in calls[:3]]
    text = "; ".join([positions, *named])
    if len(calls) == 1:
        advice = "let all ranks call it, and rank 0 print; if all do, let them leave the loop before it at one step"
        return Finding(text, f"{advice}. {IF_IT_WORKS}", pitfall="collective_on_rank_0")
    return Finding(text, f"see what each line waits for: ranks must leave a loop at one step. {IF_IT_WORKS}")


def calls_of_some_ranks(records: list[Record]) -> dict[Call, list[str]]:
    """The calls, each a collective in a line, that not all ranks have made, and who has: ["rank 0", "rank 2"]."""
    callers: dict[Call, list[str]] = defaultdict(list)
    for record in records:
        for call in record.collectives:
            callers[call].append(f"rank {record.rank}")
    return {call: ranks for call, ranks in callers.items() if len(ranks) < len(records)}


def possible_causes(calls: dict[Call, list[str]], records: list[Record]) -> list[Call]:
    """Those of the calls of some ranks that may be why all wait. The calls of one collective are left out if

    - all ranks have made equally many, as in the branches of `if rank == 0: barrier()`, `else: barrier()`, or
    - a rank waits in each of them, which another rank does not reach because of another call, or of an evaluation.
    """
    waiting = {record.waits_in for record in records}
    causes: list[Call] = []
    for name in dict.fromkeys(call.name for call in calls):
        of_name = [call for call in calls if call.name == name]
        counts = {sum(call in record.collectives for call in of_name) for record in records}
        if len(counts) > 1 and any(call.line not in waiting for call in of_name):
            causes += of_name
    return causes
