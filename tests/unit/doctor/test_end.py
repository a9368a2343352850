"""The end: which rank is the cause, and what the ranks wait for. The report: what is said of that and of the rest."""

import itertools
import os
import re
import time
from pathlib import Path

import pytest

from common.doctor import __main__ as program
from common.doctor import checks, launch, report, run_script
from common.doctor.checks import end
from common.doctor.record import Call, End, Record
from common.doctor.recorder import INTERVAL
from common.doctor.results import Passed, Skipped
from tests.unit.doctor.records import epoch_of

LOST = End("lost", "train.py:9: RuntimeError: [/third_party/gloo/pair.cc:545] Read error")
STOPPED = End("stopped", "no rank made progress for 60 s")
HEALTHY = dict.fromkeys(checks.OF_HEALTH, Passed())
RAISED_FROM = RuntimeError("step 9 failed")
RAISED_FROM.__cause__ = RuntimeError(LOST.text)


@pytest.mark.parametrize(
    "of_rank_0, of_rank_1, found",
    [
        (LOST, End("crash", "ValueError: no disk"), "rank 1 crashed after at least 0 steps: ValueError: no disk"),
        (LOST, End("finished"), f"rank 0 could not communicate ({LOST.text}), rank 1 has ended"),
        (STOPPED, End("crash", "E" * 999 + ": no disk"), f"rank 1 crashed after at least 0 steps: {'E' * 150} … E"),
        (STOPPED, STOPPED, "no rank made progress for 60 s: rank 0 is in t.py:7, rank 1 was stopped outside"),
    ],
)
def test_an_end_is_explained_by_the_rank_that_did_not_lose_another_one(of_rank_0, of_rank_1, found):
    records = [Record(0, end=of_rank_0, waits_in="t.py:7"), Record(1, end=of_rank_1)]
    for one in records:  # rank 1 has a batch more
        one.epochs.append(epoch_of(range(4 + 4 * one.rank)))
        one.epochs[0].complete = one.rank == 0
    assert end.check_end(records).text.startswith(found)
    assert end.check_end([Record(0)]).reason.startswith("rank 0 left by os._exit")
    records[1].end = End("steps")
    assert end.check_end(records) == Skipped("--steps ended it")


def reason(noted: End, exit_code: int = 0, why_stopped: str = "", printed: str = "") -> str | None:
    return end.end_of(noted, exit_code, why_stopped, [printed, "frame #0"]).reason


def test_an_end_is_what_the_rank_has_noted_or_else_how_its_process_has_failed():
    of_its_own = End("crash", "ValueError: no disk")
    assert reason(of_its_own, exit_code=-9, why_stopped="no progress", printed="DistNetworkError") == "crash"
    assert reason(End("crash", run_script.one_line(RAISED_FROM)), exit_code=1) == "lost"
    assert reason(End("finished"), exit_code=-6, printed="c10::DistBackendError") == "crash"
    assert reason(End("steps"), exit_code=-6) == "steps"
    assert reason(End(), exit_code=-9, why_stopped="no progress") == "stopped"
    assert reason(End(), exit_code=-9, printed="caught DistNetworkError") == "crash"
    assert reason(End(), exit_code=-6, printed="c10::DistBackendError") == "lost"
    assert reason(End(), exit_code=-6, printed="c10::DistBackendError: ncclInvalidUsage: Duplicate GPU") == "crash"
    assert run_script.line_of(RAISED_FROM, Path("t.py")) == ""  # no line of the script has raised it


def rank_in(line: int | None = None, **lines_of_calls: list[int]) -> Record:
    """A rank that waits in a line of t.py, and that has called these collectives in these lines."""
    calls = [Call(name, f"t.py:{number}") for name, lines in lines_of_calls.items() for number in lines]
    return Record(0, end=STOPPED, waits_in=f"t.py:{line}" if line else "", collectives=dict.fromkeys(calls))


@pytest.mark.parametrize(
    "records, named",
    [
        ([rank_in(3, reduce=[1, 3]), rank_in(9, reduce=[1])], {3: "rank 0"}),
        ([rank_in(barrier=[2]), rank_in(reduce=[1], barrier=[2])], {1: "rank 1"}),
        ([rank_in(2, barrier=[1, 2]), rank_in(3, barrier=[2], reduce=[3])], {1: "rank 0"}),  # not where a rank waits
        ([rank_in(3, barrier=[1, 3]), rank_in(9, barrier=[2])], {1: "rank 0", 3: "rank 0", 2: "rank 1"}),
        ([rank_in(reduce=[1]), rank_in(reduce=[1])], {}),  # maybe one of them once more
        ([rank_in(barrier=[1]), rank_in(barrier=[2]), rank_in(barrier=[2])], {1: "rank 0", 2: "rank 1, rank 2"}),  # if
    ],
)
def test_a_collective_that_not_all_ranks_have_called_is_named(records, named):
    for rank, record in enumerate(records):
        record.rank = rank
        record.collectives[Call("reduce", "t.py:4")] = None  # by all
    result = end.check_end(records)
    callers = re.findall(r"t\.py:(\d) was called by (.*?) alone", result.text)
    assert {int(line): ranks for line, ranks in callers} == named
    assert result.pitfall == ("collective_on_rank_0" if len(named) == 1 else None)


@pytest.mark.parametrize("caller, complete", [(None, True), (1, False), (0, True), (0, False)])
def test_a_rank_that_evaluates_alone_is_named_unless_another_collective_is_the_cause(caller, complete):
    records = [Record(0, end=STOPPED, epochs=[epoch_of(range(4), trained=False)]), Record(1, end=STOPPED)]
    records[0].epochs[0].complete = complete
    if caller is not None:  # it waits at a barrier, and handles no error of its own
        records[caller].handles = LOST.text
        records[caller].waits_in = "t.py:9"
        records[caller].collectives[Call("barrier", "t.py:9")] = None
    found = "was called by rank 0 alone" if caller == 0 else "the ranks have begun 1, 0 evaluations"
    assert end.check_end(records).text.endswith(found)


def test_an_uneven_epoch_or_evaluation_explains_a_hang_in_it_but_not_under_join():
    records = [Record(rank, end=STOPPED, epochs=[epoch_of(range(count))]) for rank, count in enumerate((20, 20, 24))]
    records[0].epochs[0].complete = False  # a batch behind
    assert end.check_end(records).pitfall == "uneven_inputs"
    records[0].has_joined = True
    assert end.check_end(records).pitfall is None
    records = [Record(rank, end=STOPPED, epochs=[epoch_of(range(24 - rank * 4), trained=False)]) for rank in range(2)]
    assert "in evaluation" not in end.check_end(records).text
    records[0].epochs[0].complete = False
    assert end.check_end(records).text.endswith("in evaluation 0 rank 0 has 6 batches, rank 1 has 5 batches")


def test_a_long_record_does_not_lengthen_the_time_between_two_looks_at_the_script(recorder, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "thread_time", itertools.count(step=1000).__next__)  # so long a write takes
    monkeypatch.setattr(os, "getppid", iter([1, 1, 1, 1, 0]).__next__)  # it ends after three looks
    monkeypatch.setattr(os, "_exit", lambda code: None)
    recorder._heartbeat()
    assert recorder.record.waits_in.startswith("test_end.py:")
    assert slept == [INTERVAL] * 3


def test_without_a_process_group_only_a_bad_end_is_examined():
    alone = Record(0, end=End("finished"), last_printed="no training")
    assert program.why_nothing_was_examined([alone, alone]).endswith("; it printed last: no training")
    for end_of_another in (STOPPED, End("crash", "ValueError")):
        records = [alone, Record(1, end=end_of_another)]
        assert program.why_nothing_was_examined(records) is None
        text = "\n".join(report.lines(checks.run_all(records), records))
        assert "Not examined: all the rest, because no optimizer step was seen before the end.\n" in text


def test_what_fails_leaves_the_answers_of_the_others_but_nothing_is_called_healthy(monkeypatch):
    monkeypatch.setattr(launch, "run_ranks", lambda *args: [Record(0, backend="gloo"), Record(1)])
    assert program.main([__file__]) == 2  # as no check is right
    monkeypatch.setitem(checks.CHECKS, "files", lambda records: records[44])
    monkeypatch.setitem(checks.CHECKS, "schedule", lambda records: Passed())
    assert program.main([__file__]) == 2
    results = checks.run_all([Record(0), Record(1)])
    assert results["files"].reason == "the check failed: IndexError: list index out of range"
    results.update(HEALTHY)
    assert "Healthy" not in "\n".join(report.lines(results, [Record(0)]))
    assert "Healthy" not in "\n".join(report.lines(HEALTHY, [Record(0, observer_errors={"f: ValueError": ""})]))
    assert "Healthy" in "\n".join(report.lines(HEALTHY, [Record(rank=0)]))
