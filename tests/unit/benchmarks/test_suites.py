"""The output and the records of `python -m benchmarks`, and suites for which something is missing.

`.ci/run bench` measures, records and draws all of them.
"""

import contextlib
import json
import os
from unittest.mock import Mock

import pytest

from benchmarks import __main__ as program
from benchmarks.harness.options import CannotMeasure, MeasureOptions
from benchmarks.suites import network, overhead, timeline
from common.processes import RankFailed

QUICK = MeasureOptions(rounds=2, data_flags=("--dataset", "synthetic"), quick=True)


@pytest.fixture
def settings_of_this_process_stay(monkeypatch, one_thread):
    monkeypatch.setattr(program, "prepare_main_process", lambda quick: None)


def test_a_suite_that_cannot_be_measured_is_named_and_the_next_one_runs(
    tmp_path, capsys, monkeypatch, settings_of_this_process_stay
):
    def cannot(options):
        raise CannotMeasure("two devices need as many cores")

    def fails(options):
        raise RankFailed({1: "NameError"})

    monkeypatch.setitem(program.SUITES, "one_step", cannot)
    monkeypatch.setitem(program.SUITES, "overhead", fails)
    monkeypatch.setitem(program.SUITES, "sharing", lambda options: {"rows": {}, "rounds": options.rounds})
    monkeypatch.setattr(program.pictures, "draw", lambda *args: [])
    with pytest.raises(SystemExit, match="1"):
        program.main(["one_step", "overhead", "sharing", "--rounds", "3", "--record", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "one_step is not measured: two devices need as many cores" in printed
    assert "overhead is not measured: rank 1: NameError" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["sharing.json"]
    assert json.loads((tmp_path / "sharing.json").read_text())["rounds"] == 3
    monkeypatch.setattr(program, "SUITES", {"one_step": cannot, "sharing": lambda options: {"rows": {}}})
    for suites in (["one_step"], ["one_step", "all"]):
        with pytest.raises(SystemExit, match="1"):
            program.main(suites)
    program.main(["all"])  # leaves out what this machine cannot measure


def count_turns(turns=[]):  # noqa: B006
    """The turns in this process, the first of which does not count, and a half more for each as a rank."""
    turns.append("RANK" in os.environ)
    return len(turns) + sum(turns) / 2


def test_contestants_of_overhead_have_a_process_each_which_is_no_rank(monkeypatch):
    monkeypatch.setattr(overhead, "LOOPS", [overhead.Loop(name, count_turns) for name in "ab"])
    (group,) = overhead.measure(QUICK)["groups"]
    assert [row["samples"] for row in group["rows"].values()] == [[2e6, 3e6]] * 2


def test_where_there_can_be_no_two_nodes_their_rows_are_left_out_and_it_is_said(monkeypatch, capsys):
    def cannot(_=None):
        raise CannotMeasure("two nodes need root")

    monkeypatch.setattr(network, "two_nodes", cannot)
    monkeypatch.setattr(timeline, "two_nodes", cannot)
    with pytest.raises(CannotMeasure, match="two nodes need root"):
        network.measure(QUICK)
    monkeypatch.setattr(timeline, "record_over", lambda link, pair, rounds: {"link": link})
    assert timeline.measure(QUICK) == {"groups": [{"link": timeline.LOOPBACK}]}
    assert "two nodes need root" in capsys.readouterr().out
    nodes = Mock(names=("a", "b"), limit=Mock(side_effect=ChildProcessError))
    monkeypatch.setattr(timeline, "two_nodes", lambda: contextlib.nullcontext(nodes))
    with pytest.raises(ChildProcessError):  # not "alone", after a link has been measured
        timeline.measure(QUICK)
