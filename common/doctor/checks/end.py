"""The end: the script comes to its last line on all ranks, and none crashes or waits for another one for ever.

Noted are the collectives that the script calls, each with the line that calls it, and by `run_script` the end.
"""

import functools
import inspect
import signal
import sys
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

from common.doctor.checks.alignment import across_ranks, first_uneven
from common.doctor.record import Call, End, Record
from common.doctor.recorder import Recorder
from common.doctor.results import Finding, Passed, Result, Skipped
from common.process_group import COLLECTIVES

LARGE = 16  # numbers; a loss or a metric has fewer, and a tensor with more may be a weight that is averaged
MAX_ERROR = 300  # characters; of a longer error the middle is left out
UNUSED = "parameters that were not used in producing loss"  # a part of DistributedDataParallel's error
IF_IT_WORKS = "If a line works, raise --time-out"
# Parts of the error of a rank whose partner has left or has called another collective. An error of gloo is a
# RuntimeError, as many errors of a script are, but it names its source file.
OF_COMMUNICATION = ("DistBackendError", "DistNetworkError", "DistStoreError", "third_party/gloo/")
OF_THE_SCRIPT = "ncclInvalidUsage"  # a DistBackendError of its own, as where two ranks have one GPU
SIGNALS = {each.value: each.name for each in signal.Signals}  # without most of the real-time signals


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
        if max(sizes, default=0) > LARGE:
            record.exchanged_after = len(record.steps)
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


def end_of(noted: End, exit_code: int, why_stopped: str, printed: list[str]) -> End:
    """The end of a rank, by what it has noted itself, how its process ended, and the lines that it has printed.

    noted     process      the end
    crash     any          lost if the text of the error names communication, else crash
    others    was stopped  stopped
    steps     any          as noted
    others    exit code 0  as noted
    finished  has failed   crash: after its last line it communicates no more
    None      has failed   lost if torch aborted it over communication, else crash
    """
    if noted.reason == "crash":
        return End("lost" if _names_communication(noted.text) else "crash", noted.text)
    if why_stopped:
        return End("stopped", why_stopped)
    if exit_code == 0 or noted.reason == "steps":
        return noted
    cause = SIGNALS.get(-exit_code, f"exit code {exit_code}")
    text = f"{cause}: last printed: {''.join(printed[-1:])}"
    if noted.reason == "finished":
        return End("crash", f"after its last line, {text}")
    was_aborted = cause == "SIGABRT" and _names_communication("\n".join(printed[-100:]))  # by a thread of torch
    return End("lost" if was_aborted else "crash", text)


def _names_communication(text: str) -> bool:
    return OF_THE_SCRIPT not in text and any(part in text for part in OF_COMMUNICATION)


def check_end(records: list[Record]) -> Result:
    reasons = [record.end.reason for record in records]
    if "crash" in reasons:  # what ended other ranks may be its consequence
        return _judge_crash(records[reasons.index("crash")])
    if "steps" in reasons:  # a rank that has made them leaves, and the others may need it for theirs
        return Skipped("--steps ended it")
    positions = ", ".join(map(_position, records))
    if "lost" in reasons:
        return _judge_wait(records, positions)
    if "stopped" in reasons:
        return _judge_wait(records, f"{records[reasons.index('stopped')].end.text}: {positions}")
    if None in reasons:
        return Skipped(f"rank {reasons.index(None)} left by os._exit, and was not seen after its last record")
    return Passed()


def _judge_crash(record: Record) -> Finding:
    text = f"rank {record.rank} crashed after at least {len(record.steps)} steps: {_shortened(record.end.text)}"
    if UNUSED not in record.end.text:
        return Finding(text, "mend the error, and call the doctor again")
    return Finding(
        f"{text}; DistributedDataParallel waits for the gradients of parameters that the forward does not use",
        "freeze or remove them before wrapping, or let DDP look for them with find_unused_parameters=True",
        pitfall="unused_parameter",
    )


def _position(record: Record) -> str:
    if record.end.reason == "lost":
        return f"rank {record.rank} could not communicate ({_shortened(record.end.text)})"
    if record.end.reason == "stopped":
        where = f"is in {record.waits_in}" if record.waits_in else "was stopped outside of the script"
        return f"rank {record.rank} {where}"
    return f"rank {record.rank} has ended"


def _shortened(error: str) -> str:
    half = MAX_ERROR // 2
    return error if len(error) <= MAX_ERROR else f"{error[:half]} … {error[-half:]}"


def _judge_wait(records: list[Record], positions: str) -> Finding:
    """The finding where no rank has an error of its own; `positions` says where each rank is."""
    # Uneven epochs come first: they also make the collectives differ, and explain it.
    uneven = first_uneven(record.training_epochs for record in records)
    if uneven and not any(record.has_joined for record in records):
        text = f"{positions}; in epoch {uneven.number} {uneven.counts}"
        return Finding(text, "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    are_sharded = any(record.is_sharded for record in records)
    uneven = first_uneven(record.evaluations for record in records)
    if uneven and are_sharded:
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
        if are_sharded:
            advice = "evaluate on all ranks: each forward gathers the sharded parameters"
        return Finding(text, f"{advice}. {IF_IT_WORKS}", pitfall="collective_on_rank_0")
    return Finding(text, f"see what each line waits for: ranks must leave a loop at one step. {IF_IT_WORKS}")


def calls_of_some_ranks(records: list[Record]) -> dict[Call, str]:
    """The calls, each a collective in a line, that not all ranks have made, and who has: "rank 0, rank 2".

    Ranks may call one collective in different lines. So the first such call of each rank belongs together, then the
    second, and these are left out, unless nothing else is left:

    if rank != 0: barrier()    that of rank 1, which belongs to
    if rank == 0: barrier()    that of rank 0
    if rank == 0: barrier()    called by rank 0 alone
    """
    callers: dict[Call, list[int]] = defaultdict(list)
    for record in records:
        for call in record.collectives:
            callers[call].append(record.rank)
    partly = {call: ranks for call, ranks in callers.items() if len(ranks) < len(records)}
    answered: set[Call] = set()
    for name in {call.name for call in partly}:
        of_ranks = [[call for call in record.collectives if call in partly and call.name == name] for record in records]
        answered.update(*across_ranks(of_ranks))
    unanswered = [call for call in partly if call not in answered]
    return {call: ", ".join(f"rank {rank}" for rank in partly[call]) for call in unanswered or partly}
