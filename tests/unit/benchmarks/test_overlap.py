"""The cost of ways to average gradients: the record, its plot, the bytes on the wire, and the drift."""

import json
import time

import numpy
import pytest
import torch.distributed as dist

from benchmarks.harness import records
from benchmarks.harness.gradient_averaging import (
    ALONE,
    ALONE_TWICE,
    NAIVE,
    NO_SYNC,
    TORCH,
    WAYS,
    AveragedTraining,
    noise,
)
from benchmarks.harness.groups import seconds_per_step
from benchmarks.harness.overlap_rank import sent_bytes, time_steps, train
from benchmarks.harness.two_nodes import why_not
from benchmarks.report import overlap_plot
from benchmarks.suites import overlap
from benchmarks.suites.network import network
from common.process_group import process_group
from common.processes import ranks

TWO_NODES = pytest.mark.skipif(why_not() is not None, reason=f"no two nodes: {why_not()}")
MACHINE = {"processor": "abacus", "cores": 2, "gpus": [], "torch": "2"}
GRADIENT = 7_616_296  # bytes of DeepNet's parameters
SAMPLES = {
    ALONE: [100.0, 102.0, 101.0],
    ALONE_TWICE: [98.0, 100.0, 99.0],
    NAIVE: [200.0, 204.0, 202.0],
    TORCH: [120.0, 125.0, 122.0],
    NO_SYNC: [111.0, 110.0, 112.0],
    "fp16": [110.0, 111.0, 109.0],
}


PROCESS = {"threads_per_process": 1, "pinned_to_cores": True}


class _Cable:
    """A network on which every way takes the milliseconds of SAMPLES and sends half a gradient."""

    def __init__(self) -> None:
        self.limited: list[str] = []

    def limit(self, name: str) -> None:
        self.limited.append(name)

    def ask(self, job: str, way: str, steps: int) -> list[dict]:
        slower = {"seconds": SAMPLES[way][0] / 1000, "bytes": GRADIENT / 2, "process": PROCESS}
        return [{"seconds": 0.001, "bytes": 1.0, "process": PROCESS}, slower]


def _group(name: str = "1 Gbit/s") -> dict:
    link = overlap.Link(_Cable(), name, steps=1)
    for sample in link.contestants(SAMPLES).values():
        sample()
    drift = {TORCH: overlap.Drift(0.0, 0.5), "fp16": overlap.Drift(0.0123, 0.51)}
    return overlap.record(link, SAMPLES, drift, training_steps=9)


def test_a_sample_is_the_slower_ranks_time_and_what_it_sent():
    cable = _Cable()
    link = overlap.Link(cable, "100 Mbit/s", steps=1)
    contestants = link.contestants([NAIVE, TORCH])
    assert [sample() for sample in contestants.values()] == [200.0, 120.0]
    assert cable.limited == ["100 Mbit/s"] * 2
    assert link.sent == {NAIVE: [GRADIENT / 2], TORCH: [GRADIENT / 2]}


def test_the_record_says_what_each_way_adds_sends_and_changes():
    group = _group()
    added = {way: pair["median"] for way, pair in overlap.added(group).items()}
    assert added == {NAIVE: 101.0, TORCH: 21.0, NO_SYNC: 13.0, "fp16": 9.0}
    assert group["rows"]["fp16"]["drift"] == 0.0123 and "drift" not in group["rows"][NAIVE]
    assert group["rows"][NO_SYNC]["backwards_per_step"] == 2
    assert all(PROCESS.items() <= row.items() for row in group["rows"].values())
    pairs = {pair["of"]: pair["to"] for pair in group["pairs"] if pair["kind"] == "ratio"}
    assert pairs == {TORCH: NAIVE, NO_SYNC: NAIVE, "fp16": NAIVE}
    baselines = {pair["of"]: pair["to"] for pair in group["pairs"] if pair["kind"] == "difference"}
    assert baselines == {NAIVE: ALONE, TORCH: ALONE, NO_SYNC: ALONE_TWICE, "fp16": ALONE}
    assert seconds_per_step(group, NAIVE) == pytest.approx([0.2, 0.204, 0.202])  # what pytest-benchmark shows
    lines = records.table(group).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["fp16", "9", "3.81", "0.012", "0.510"] for line in lines)


def test_a_bar_is_the_step_that_computes_the_same_and_what_averaging_adds_to_it():
    bars = {bar.way: bar for bar in overlap_plot._bars(_group())}
    assert (bars[NAIVE].computing, bars[NAIVE].end) == (101.0, 202.0)
    assert (bars[NO_SYNC].computing, bars[NO_SYNC].end) == (99.0, 112.0)
    assert bars[ALONE].end == bars[ALONE].computing == 101.0
    assert bars["fp16"].text == "+9 ms, 3.8 MB, drift 1.2%"


def _seconds_beside_a_slower_rank(way: str) -> float:
    """One step of this rank, where rank 1 sleeps for 0.3 seconds before it."""
    with process_group():
        training = AveragedTraining(way)
        images, targets = noise(way, dist.get_rank())
        dist.barrier()
        began = time.perf_counter()
        time.sleep(0.3 * dist.get_rank())
        training.step(images, targets)
        return time.perf_counter() - began


@pytest.mark.parametrize("way", [ALONE, ALONE_TWICE, TORCH])
def test_every_way_waits_for_a_slower_rank_so_that_the_wait_is_no_cost_of_averaging(way):
    assert min(ranks(2).run(_seconds_beside_a_slower_rank, way)) > 0.3


def test_the_lanes_and_the_suite_measured_one_step_if_they_differ_by_no_more_than_the_spread():
    rows = {way: {"median": 201.0, "low": 200.0, "high": 202.0} for way in (NAIVE, TORCH, "something else")}
    rows[NO_SYNC] = {"median": 223.0, "low": 222.5, "high": 223.5}
    timeline = [{"link": "threads", "rows": {"DataParallel": {}}}, {"link": "1 Gbit/s", "rows": rows}]
    found = overlap_plot.agreements(timeline, [_group(), _group("100 Mbit/s")])
    assert {agreement.way: agreement.holds for agreement in found} == {NAIVE: True, TORCH: False, NO_SYNC: True}
    two_backwards = found[-1]
    assert (two_backwards.timed, two_backwards.spread) == (222.0, 3.0)
    assert str(found[0]) == "naive over 1 Gbit/s: 201 ms in the lanes, 202 ms timed, within the spread of 4 ms"


def test_the_plot_is_drawn_from_the_record_alone_and_not_without_it(tmp_path, coarse):
    groups = [_group(name) for name in overlap.LINKS]
    overlap_plot.draw(json.loads(json.dumps(groups)), MACHINE, tmp_path)
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyError):
        overlap_plot.draw([{"rows": groups[0]["rows"]}], MACHINE, tmp_path)
    assert not (tmp_path / "overlap.png").exists(), "an old plot can be taken for new"


def test_bytes_are_counted_at_the_interface_that_gloo_uses(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    assert sent_bytes() == 0


@pytest.mark.long
def test_only_compression_drifts():
    ways = (NAIVE, TORCH, "fp16", "bf16", "PowerSGD")
    drift = overlap.drifts((*ways, ALONE), steps=6)
    assert tuple(drift) == ways
    # Between two ranks a sum has one order, and its half is exact: not even the last bit differs.
    assert drift[NAIVE] == drift[TORCH]
    assert drift[TORCH].share == 0
    assert 0 < drift["fp16"].share < drift["bf16"].share < drift["PowerSGD"].share < 2


@pytest.mark.long
@TWO_NODES
def test_bytes_on_the_wire_are_the_gradients_and_compression_halves_them():
    ways = (ALONE, TORCH, NO_SYNC, "torch's, one per parameter", "fp16", "PowerSGD")
    with network() as net:
        link = overlap.Link(net, "unlimited", steps=1)
        for sample in link.contestants(ways).values():
            assert sample() > 0
    sent = {way: counts[0] / GRADIENT for way, counts in link.sent.items()}
    # Between two ranks each gradient travels once each way; headers and acknowledgements take some per cent.
    assert sent[TORCH] == pytest.approx(1.0, abs=0.05)
    assert sent["torch's, one per parameter"] == pytest.approx(1.0, abs=0.08)
    assert sent["fp16"] == pytest.approx(0.5, abs=0.03)
    assert sent[NO_SYNC] == pytest.approx(0.5, abs=0.03)
    assert sent["PowerSGD"] < 0.1
    assert sent[ALONE] < 0.01


@pytest.mark.long
def test_every_way_runs_and_is_timed():
    for way in WAYS:
        answers = ranks(2).run(time_steps, way, 1)
        assert all(answer["seconds"] > 0 for answer in answers), way


@pytest.mark.slow
def test_power_sgd_keeps_the_order_of_its_messages():
    """With several buckets the ranks' threads of gloo may start them in different orders, and the training ends."""
    one, other = ranks(2).run(train, "PowerSGD", 60)
    apart = numpy.linalg.norm(one["end"] - other["end"])
    went = numpy.linalg.norm(one["end"] - one["start"])
    # Not to the last bit: each rank multiplies the thin matrices itself, and a product may depend on where its operands
    # lie in memory. Ranks that had mixed up two messages would be as far apart as they went.
    assert apart < 0.1 * went
