"""The report, and the exit code, of results and records that are made by hand."""

from common.doctor import __main__ as program
from common.doctor import checks, launch, report
from common.doctor.record import End, Record
from common.doctor.results import Passed
from tests.unit.doctor.records import STOPPED

HEALTHY = dict.fromkeys(checks.OF_HEALTH, Passed())


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
