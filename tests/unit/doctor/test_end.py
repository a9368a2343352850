"""The end: which rank is the cause, and which collective, evaluation or epoch the ranks wait in."""

import itertools
import os
import re
import threading
import time
from pathlib import Path

import pytest

from common.doctor import run_script
from common.doctor.checks.end import check_end, end_of
from common.doctor.record import PROGRESS, Call, End, Record
from common.doctor.results import Skipped
from tests.unit.doctor.records import STOPPED, epoch_of

LOST = End("lost", "train.py:9: RuntimeError: [/third_party/gloo/pair.cc:545] Read error")


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
    assert check_end(records).text.startswith(found)
    assert check_end([Record(0)]).reason.startswith("rank 0 left by os._exit")
    records[1].end = End("steps")
    assert check_end(records) == Skipped("--steps ended it")


def reason(noted: End, exit_code: int = 0, why_stopped: str = "", printed: str = "") -> str | None:
    return end_of(noted, exit_code, why_stopped, [printed, "frame #0"]).reason


def test_a_rank_that_has_noted_an_error_has_crashed_or_lost_another_rank():
    of_its_own = End("crash", "ValueError: no disk")
    assert reason(of_its_own, exit_code=-9, why_stopped="no progress", printed="DistNetworkError") == "crash"
    error = RuntimeError("step 9 failed")
    error.__cause__ = RuntimeError(LOST.text)
    assert reason(End("crash", run_script.one_line(error)), exit_code=1) == "lost"
    assert run_script.line_of(error, Path("t.py")) == ""  # no line of the script has raised it


def test_a_rank_that_has_noted_no_end_was_stopped_or_ended_by_a_signal():
    assert reason(End(), exit_code=-9, why_stopped="no progress") == "stopped"
    assert reason(End(), exit_code=-9, printed="caught DistNetworkError") == "crash"
    assert reason(End(), exit_code=-6, printed="c10::DistBackendError") == "lost"
    assert reason(End(), exit_code=-6, printed="c10::DistBackendError: ncclInvalidUsage: Duplicate GPU") == "crash"


def test_a_rank_that_fails_after_its_end_has_crashed_but_not_if_the_doctor_has_ended_it():
    assert reason(End("finished"), exit_code=-6, printed="c10::DistBackendError") == "crash"
    assert reason(End("steps"), exit_code=-6) == "steps"


def waiting(**lines: list[int] | int) -> Record:
    """A rank that has called these collectives in these lines of t.py, and that waits in line `waits_in`."""
    waits_in = lines.pop("waits_in", None)
    calls = [Call(name, f"t.py:{line}") for name, of_name in lines.items() for line in of_name]
    return Record(0, end=STOPPED, collectives=dict.fromkeys(calls), waits_in=f"t.py:{waits_in}" if waits_in else "")


@pytest.mark.parametrize(
    "records, named",
    [
        pytest.param(
            [waiting(all_reduce=[1, 3], waits_in=3), waiting(all_reduce=[1], waits_in=9)],
            {3: "rank 0"},
            id="which nobody else calls",
        ),
        pytest.param([waiting(barrier=[2]), waiting(all_reduce=[1], barrier=[2])], {1: "rank 1"}, id="before the next"),
        pytest.param(
            [waiting(barrier=[1, 2], waits_in=2), waiting(barrier=[2], all_reduce=[3], waits_in=3)],
            {1: "rank 0"},
            id="and not the one in which a rank waits",
        ),
        pytest.param(
            [waiting(barrier=[1, 3], waits_in=3), waiting(barrier=[2], waits_in=9)],
            {1: "rank 0", 3: "rank 0", 2: "rank 1"},
            id="or one of several",
        ),
        pytest.param([waiting(all_reduce=[1]), waiting(all_reduce=[1])], {}, id="or none, as all have called it"),
        pytest.param(
            [waiting(barrier=[1], all_reduce=[3]), *[waiting(barrier=[2], all_reduce=[3]) for _ in range(2)]],
            {1: "rank 0", 2: "rank 1, rank 2"},
            id="or each branch of an if",
        ),
    ],
)
def test_a_collective_that_not_all_ranks_have_called_is_named(records, named):
    for rank, record in enumerate(records):
        record.rank = rank
    result = check_end(records)
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
    assert check_end(records).text.endswith(found)


def test_an_uneven_epoch_explains_a_hang_in_it_but_not_under_join():
    records = [Record(rank, end=STOPPED, epochs=[epoch_of(range(count))]) for rank, count in enumerate((20, 20, 24))]
    records[0].epochs[0].complete = False  # a batch behind
    assert check_end(records).pitfall == "uneven_inputs"
    records[0].has_joined = True
    assert check_end(records).pitfall is None


def test_an_uneven_evaluation_explains_a_hang_in_it():
    records = [Record(rank, end=STOPPED, epochs=[epoch_of(range(24 - rank * 4), trained=False)]) for rank in range(2)]
    assert "in evaluation" not in check_end(records).text
    records[0].epochs[0].complete = False
    assert check_end(records).text.endswith("in evaluation 0 rank 0 has 6 batches, rank 1 has 5 batches")


def test_a_script_whose_record_is_long_is_still_seen_to_make_progress(recorder, monkeypatch, tmp_path):
    monkeypatch.setattr(time, "thread_time", itertools.count(step=1000).__next__)  # a write takes 1000 s
    monkeypatch.setattr(os, "_exit", lambda code: None)
    heart = threading.Thread(target=recorder._heartbeat, daemon=True)
    heart.start()
    assert comes_true(lambda: recorder.record.waits_in != "")
    (tmp_path / PROGRESS).unlink()
    recorder.guarded(lambda: None)()
    assert comes_true((tmp_path / PROGRESS).exists)
    monkeypatch.setattr(os, "getppid", lambda: -1)
    heart.join(timeout=10)
    assert not heart.is_alive()


def comes_true(question) -> bool:
    return any(question() or time.sleep(0.05) for _ in range(200))
