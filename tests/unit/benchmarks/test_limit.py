"""The staircase: every stair is the same training, and one that is not is refused."""

import pytest
import torch

from benchmarks.suites import limit
from common.args import parse_args
from common.data import load_data
from common.ladder import script

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    flags = ["--dataset", "synthetic", "--train-samples", "256"]
    train_set, _ = load_data(parse_args(str(script("00_single_gpu")), flags))
    return train_set


def stair(change: str) -> limit.Stair:
    return limit.Stair(change, limit.Step(**{change: True}))


@pytest.mark.parametrize("change", ["fused", pytest.param("channels_last", marks=pytest.mark.slow)])
def test_a_stair_of_the_cpu_trains_the_same_weights(change, digits, one_thread, monkeypatch):
    monkeypatch.setattr(limit, "CHECKED_STEPS", 3)
    assert limit.distance(stair(change), digits, CPU) <= limit.EXACT


@pytest.mark.long
@pytest.mark.parametrize("change", ["bf16", "compiled"])
def test_the_stairs_that_take_long_train_the_same_weights_too(change, digits):
    if change == "compiled" and limit.why_no_compiler(CPU):
        pytest.skip(limit.why_no_compiler(CPU))
    climbed = stair(change)
    assert limit.distance(climbed, digits, CPU) <= climbed.tolerance


def test_a_stair_that_is_another_training_is_refused(digits, one_thread, monkeypatch):
    honest = limit.Training._indices

    def one_batch_later(training, steps):
        batches = list(honest(training, steps + 1))
        return iter(batches[1:] if training.how.fused else batches[:-1])

    monkeypatch.setattr(limit, "CHECKED_STEPS", 2)
    monkeypatch.setattr(limit.Training, "_indices", one_batch_later)
    monkeypatch.setattr(limit, "stairs", lambda device: [stair("fused")])
    with pytest.raises(ValueError, match="fused is another training"):
        limit.Staircase(digits, CPU, steps=1)


def test_what_a_machine_cannot_do_is_named_and_not_a_stair_for_the_next(monkeypatch):
    monkeypatch.setattr(limit, "why_no_bf16", lambda device: "the CPU has no bf16 instructions")
    by_name = {each.name: each for each in limit.stairs(CPU)}
    assert by_name["+ bf16"].obstacle == "the CPU has no bf16 instructions"
    assert not by_name["+ torch.compile"].step.bf16
    assert by_name["+ torch.compile"].step.fused


def test_the_stairs_of_a_gpu_go_from_pageable_memory_to_one_graph(monkeypatch):
    monkeypatch.setattr(limit, "why_no_bf16", lambda device: None)
    steps = [each.step for each in limit.stairs(torch.device("cuda"))]
    assert steps[0] == limit.Step()
    assert steps[-1] == limit.Step(*[True] * 7)
    changes = [sum(vars(step).values()) for step in steps]
    assert changes == list(range(8))


def test_the_profile_counts_operations(digits, one_thread):
    training = limit.Training(limit.Step(), digits, CPU)
    training.train(1)
    seen = limit.profiled(training)
    assert seen.launches > 20
    assert seen.waiting is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU check: the stairs on a GPU train the same weights")
def test_every_stair_of_a_gpu_trains_the_same_weights(digits):
    device = torch.device("cuda")
    for climbed in limit.stairs(device):
        if climbed.obstacle is None:
            assert limit.distance(climbed, digits, device) <= climbed.tolerance, climbed.name
