"""The end: the script comes to its last line on all ranks, and none crashes or waits for another one for ever.

`run_script` notes an error, the recorder's heartbeat where a rank waits, and `launch` how the process has ended.
"""

import signal

from common.doctor.checks.collectives import judge_wait
from common.doctor.record import End, Record
from common.doctor.results import Finding, Passed, Result, Skipped

MAX_ERROR = 300  # characters; of a longer error the middle is left out
UNUSED = "parameters that were not used in producing loss"  # a part of DistributedDataParallel's error
# Parts of the error of a rank whose partner has left or has called another collective. An error of gloo is a
# RuntimeError, as many errors of a script are, but it names its source file.
OF_COMMUNICATION = ("DistBackendError", "DistNetworkError", "DistStoreError", "third_party/gloo/")
OF_THE_SCRIPT = "ncclInvalidUsage"  # a DistBackendError of its own, as where two ranks have one GPU
SIGNALS = {each.value: each.name for each in signal.Signals}  # without most of the real-time signals


def end_of(noted: End, exit_code: int, why_stopped: str, printed: list[str]) -> End:
    """The end of a rank, by what it has noted itself, how its process ended, and the lines that it has printed."""
    if noted.reason == "crash":
        return End("lost" if _names_communication(noted.text) else "crash", noted.text)
    if why_stopped:
        return End("stopped", why_stopped)
    if noted.reason == "steps" or exit_code == 0:
        return noted
    cause = SIGNALS.get(-exit_code, f"exit code {exit_code}")
    text = f"{cause}: last printed: {''.join(printed[-1:])}"
    if noted.reason == "finished":  # after its last line a script communicates no more
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
        return judge_wait(records, positions)
    if "stopped" in reasons:
        positions = f"{records[reasons.index('stopped')].end.text}: {positions}"
        errors = [record.handles for record in records if record.waits_in and record.handles]
        if 0 < len(errors) < len(records) and not any(map(_names_communication, errors)):
            return Finding(positions, "mend the error that a rank handles while it waits for the others")
        return judge_wait(records, positions)
    if None in reasons:
        return Skipped(f"rank {reasons.index(None)} left by os._exit, and was not seen after its last record")
    return Passed()


def _judge_crash(record: Record) -> Finding:
    text = f"rank {record.rank} crashed after at least {len(record.steps)} steps: {_shortened(record.end.text)}"
    if UNUSED not in record.end.text:
        return Finding(text, "mend the error, and call the doctor again")
    text = f"{text}; DistributedDataParallel waits for the gradients of parameters that the forward does not use"
    advice = "freeze or remove them before wrapping, or let DDP look for them with find_unused_parameters=True"
    return Finding(text, advice, pitfall="unused_parameter")


def _position(record: Record) -> str:
    if record.end.reason == "lost":
        return f"rank {record.rank} could not communicate ({_shortened(record.end.text)})"
    if record.end.reason == "stopped":
        where = f"is in {record.waits_in}" if record.waits_in else "was stopped outside of the script"
        if record.waits_in and record.handles:
            where = f"{where} and handles {_shortened(record.handles)}"
        return f"rank {record.rank} {where}"
    return f"rank {record.rank} has ended"


def _shortened(error: str) -> str:
    half = MAX_ERROR // 2
    return error if len(error) <= MAX_ERROR else f"{error[:half]} … {error[-half:]}"
