"""The parts of a step: each is charged with its own time, and together they are the whole."""

import time

import pytest
import torch

from benchmarks.harness import proof
from benchmarks.harness.parts import AVERAGING, BACKWARD, COPIES, FORWARD, LOADING, StepTimes, watching
from benchmarks.report.group_table import table
from benchmarks.suites import anatomy
from common.model import BasicNet

FLAGS = ["--dataset", "synthetic", "--device", "cpu", "--batch-size", "4", "--max-steps", "7", "--eval-samples", "4"]
PAUSE = 0.03  # seconds: far more than any part of such a step takes


def slowed(function):
    def slow(*args, **kwargs):
        time.sleep(PAUSE)
        return function(*args, **kwargs)

    return slow


@pytest.mark.parametrize(
    "owner, name, part",
    [
        (BasicNet, "forward", FORWARD),
        (torch.utils.data.dataloader._SingleProcessDataLoaderIter, "_next_data", LOADING),
        (torch.autograd, "backward", BACKWARD),
    ],
)
def test_a_pause_in_a_levels_step_is_charged_to_its_part_and_no_other(owner, name, part, monkeypatch, one_thread):
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    before = getattr(owner, name)
    with watching() as clock:
        proof.train("00_single_gpu", FLAGS, threads=1)
    assert getattr(owner, name) is before
    watched = [step for step in clock.steps if step.parts is not None]
    alone = [step for step in clock.steps if step.parts is None]
    assert len(watched) == len(alone) == 3
    assert all(step.seconds >= PAUSE for step in alone)
    for step in watched:
        assert step.parts[part] >= PAUSE
        assert step.seconds == pytest.approx(sum(step.parts.values()))
    for other in watched[0].parts.keys() - {part}:
        # Of the three, because on a busy machine any part of one step may take long.
        assert min(step.parts[other] for step in watched) < PAUSE, other


def test_copies_of_data_parallel_are_no_part_of_its_forward(one_thread):
    with watching() as clock:
        proof.train("01_data_parallel", [*FLAGS, "--replicas", "2"], threads=1)
    for step in clock.steps:
        if step.parts is not None:
            assert {COPIES, FORWARD, BACKWARD} < step.parts.keys() and AVERAGING not in step.parts
            assert step.seconds == pytest.approx(sum(step.parts.values()))


def test_the_rank_that_waits_least_says_what_averaging_costs():
    early = [StepTimes(0.010, None), StepTimes(0.012, {BACKWARD: 0.004, AVERAGING: 0.008})]
    late = [StepTimes(0.010, None), StepTimes(0.012, {BACKWARD: 0.010, AVERAGING: 0.002})]
    found = anatomy.times([early, late])
    assert found.whole == pytest.approx(10)
    assert found.parts[BACKWARD] == pytest.approx(7)
    assert found.parts[AVERAGING] == pytest.approx(2)
    assert found.parts[anatomy.WAITING] == pytest.approx(3)
    assert sum(found.parts.values()) == pytest.approx(12)


def test_a_record_says_how_much_of_the_whole_the_parts_are_and_its_table_fits():
    def run(left_over: float) -> anatomy.Times:
        return anatomy.Times(50 + left_over, dict.fromkeys(anatomy.PARTS, 0.0) | {FORWARD: 20.0, BACKWARD: 30.0})

    found = anatomy.record({name: [run(0.5), run(0.7)] for name in anatomy.ROWS}, 4)
    assert found["rows"][anatomy.ONE.name]["sum_of_whole"] == pytest.approx(50 / 50.6, abs=1e-4)
    lines = table(found).splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1].split()[-1] == "50.60"
