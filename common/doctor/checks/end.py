"""`Record.end`: the script has come to its end, or a rank has crashed, or ranks wait for each other."""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.waiting import why_ranks_wait
from common.doctor.record import Record

MAX_ERROR = 300  # characters; of a longer error the middle is left out
UNUSED = "parameters that were not used in producing loss"  # a part of DistributedDataParallel's error


def check_end(records: list[Record]) -> Answer:
    """Right if each rank has come to the last line; a Finding if one has crashed, or ranks wait for each other."""
    reasons = [record.end.reason for record in records]
    if "crash" in reasons:  # what ended other ranks may be its consequence
        return _crashed(records[reasons.index("crash")])
    if "steps" in reasons:  # a rank that has made them leaves, and the others may need it for theirs
        return NotExamined("--steps ended it")
    positions = ", ".join(map(_position, records))
    if "lost" in reasons:
        return why_ranks_wait(records, positions)
    if "stopped" in reasons:
        return why_ranks_wait(records, f"{records[reasons.index('stopped')].end.text}: {positions}")
    if None in reasons:
        return NotExamined(f"rank {reasons.index(None)} left by os._exit, and was not seen after its last record")
    return Right()


def _crashed(record: Record) -> Finding:
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
