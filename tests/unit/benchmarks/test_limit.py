"""The staircase: every stair is the same training, and one that is not is refused."""

import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.report import limit_plot
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


def stair(*changes: str) -> limit.Stair:
    return limit.Stair(" ".join(changes), limit.Step(**dict.fromkeys(changes, True)))


def unpinned(tensor: torch.Tensor) -> torch.Tensor:
    """Stands where `Tensor.pin_memory` would, which needs a GPU."""
    return tensor


def other_batches_for(change: str, monkeypatch) -> None:
    """Let the stairs that make this change train on each batch one step earlier."""
    drawn = limit.Training._drawn

    def one_batch_later(training):
        batches = drawn(training)
        return batches[1:] + batches[:1] if getattr(training.how, change) else batches

    monkeypatch.setattr(limit.Training, "_drawn", one_batch_later)


@pytest.mark.parametrize(
    "change",
    [
        "fused",
        pytest.param("resident", marks=pytest.mark.slow),
        pytest.param("channels_last", marks=pytest.mark.slow),
        pytest.param("compiled", marks=pytest.mark.long),
    ],
)
def test_a_stair_trains_the_same_weights(change, digits, one_thread, monkeypatch):
    if change == "compiled" and limit.why_no_compiler(CPU):
        pytest.skip(limit.why_no_compiler(CPU))
    monkeypatch.setattr(limit, "CHECKED_STEPS", 3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", unpinned)
    assert limit.distance(stair(change), digits, CPU) <= limit.EXACT


@pytest.mark.long
def test_bf16_drifts_less_than_it_may(digits):
    found = limit.checked(stair("bf16"), digits, CPU)
    assert 0 < found["drift"] <= found["most_drift"]


def test_a_stair_that_is_another_training_is_refused(digits, one_thread, monkeypatch):
    monkeypatch.setattr(limit, "CHECKED_STEPS", 2)
    other_batches_for("fused", monkeypatch)
    monkeypatch.setattr(limit, "stairs", lambda device: [stair("fused")])
    with pytest.raises(ValueError, match="fused is another training"):
        limit.Staircase(digits, CPU, seconds=1)


def test_bf16_that_trains_on_other_batches_is_refused(digits, one_thread, monkeypatch):
    monkeypatch.setattr(limit, "CHECKED_STEPS", 2)
    other_batches_for("bf16", monkeypatch)
    with pytest.raises(ValueError, match="bf16 is another training: it drifts"):
        limit.checked(stair("bf16"), digits, CPU)


def test_a_compiler_that_computes_something_else_is_refused_above_bf16_too(digits, one_thread, monkeypatch):
    monkeypatch.setattr(limit, "CHECKED_STEPS", 2)
    monkeypatch.setattr(torch, "compile", lambda model: lambda images: model(1.0001 * images))
    with pytest.raises(ValueError, match=r"bf16 compiled is another training: .* in float64"):
        limit.checked(stair("bf16", "compiled"), digits, CPU)


def test_what_a_machine_cannot_do_is_named_and_not_a_stair_for_the_next(monkeypatch):
    monkeypatch.setattr(limit, "why_no_bf16", lambda device: "the CPU has no bf16 instructions")
    by_name = {each.name: each for each in limit.stairs(CPU)}
    assert by_name["+ bf16"].obstacle == "the CPU has no bf16 instructions"
    assert not by_name["+ torch.compile"].step.bf16
    assert by_name["+ torch.compile"].step.fused


def test_the_stairs_of_a_gpu_go_from_level_00_to_one_graph(monkeypatch):
    monkeypatch.setattr(limit, "why_no_bf16", lambda device: None)
    monkeypatch.setattr(limit, "why_no_compiler", lambda device: None)
    found = limit.stairs(torch.device("cuda"))
    steps = [each.step for each in found]
    assert found[0].name == "as level 00" and steps[0] == limit.Step()
    assert steps[-1] == limit.Step(*[True] * 6)
    changes = [sum(vars(step).values()) for step in steps]
    assert changes == list(range(7))


def test_every_epoch_has_the_same_batches(digits):
    training = limit.Training(limit.Step(), digits, CPU)
    batches = training._batches()
    labels = [next(batches)[1] for _ in range(2 * len(digits) // limit.BATCH_SIZE)]
    half = len(labels) // 2
    assert not torch.equal(labels[0], labels[1])
    assert all(torch.equal(first, second) for first, second in zip(labels[:half], labels[half:], strict=True))


def test_the_profile_counts_the_operations_of_the_optimizer_too(digits, one_thread):
    launches = []
    for step in (limit.Step(), limit.Step(fused=True)):
        training = limit.Training(step, digits, CPU)
        training.train(1)
        seen = limit.profiled(training)
        assert seen.waiting is None
        launches.append(seen.launches)
    as_level_00, fused = launches
    # For each of eight parameters AdamW counts steps, decays, and updates the two means and the weight.
    assert as_level_00 - fused >= 8 * 5


def event(name: str, caller=None, **more) -> SimpleNamespace:
    """As a profile has it."""
    known = {"device_type": DeviceType.CPU, "is_user_annotation": False}
    return SimpleNamespace(name=name, cpu_parent=caller, **(known | more))


def test_an_operation_counts_whoever_calls_it_but_for_another_operation():
    step = event("Optimizer.step#AdamW.step")
    linear = event("aten::linear")
    aside = event("something else", linear)
    events = [step, event("aten::mul_", step), linear, event("aten::addmm", linear), aside, event("aten::t", aside)]
    assert limit.operations(events) == 2


def test_what_waits_after_the_last_step_is_not_waiting_of_a_step():
    def lasts(begin: int, end: int) -> dict:
        return {"time_range": SimpleNamespace(start=begin, end=end), "cpu_time_total": end - begin}

    gpu = {"device_type": DeviceType.CUDA}
    events = [
        event(limit.MAKING_STEPS, **lasts(0, 5000)),
        event(limit.MAKING_STEPS, **lasts(100, 9000), **gpu | {"is_user_annotation": True}),
        event("convolution", **lasts(200, 300), **gpu),
        event("Memcpy HtoD", **lasts(300, 400), **gpu),
        event("cudaLaunchKernel", **lasts(100, 150)),
        event("cudaStreamSynchronize", **lasts(1000, 3000)),
        event("cudaDeviceSynchronize", **lasts(5001, 9000)),
    ]
    assert limit.waiting_ms(events) == 2
    assert limit.kernels(events) == 2


def test_a_sample_is_as_many_steps_as_take_the_seconds_that_were_asked_for(monkeypatch):
    class Slow:
        seconds = 0.0

        def train(self, steps):
            self.seconds += steps * 0.25

    training = Slow()
    monkeypatch.setattr(limit.time, "perf_counter", lambda: training.seconds)
    assert limit.steps_for(3, training) == 12
    assert limit.steps_for(0.1, training) == 1
    assert limit.images_per_sec(training, 8) == 4 * limit.BATCH_SIZE


@pytest.mark.parametrize(
    "flags, said",
    [
        (["avx2", "avx512_bf16"], "This CPU has instructions for bf16: avx512_bf16."),
        (["avx2"], "This CPU has none of the instructions for bf16 that torch uses: avx512_bf16, amx_bf16, bf16."),
    ],
)
def test_the_record_says_by_which_instructions_the_cpu_computes_in_bf16(flags, said, monkeypatch):
    monkeypatch.setattr(limit.records, "machine", lambda: {"cpu_flags": flags})
    assert limit.bf16_instructions(CPU) == said


def test_the_fastest_stair_is_compared_with_the_first_and_all_are_drawn(tmp_path, coarse):
    class Climbed:
        device = CPU
        facts: ClassVar = {
            name: {"device": "cpu", "launches_per_step": 1, "waiting_ms_per_step": None} for name in "abc"
        }
        skipped: ClassVar = ["d: the CPU cannot"]

    found = limit.record({"a": [10.0, 11.0], "b": [20.0, 21.0], "c": [15.0, 16.0]}, Climbed)
    assert [(pair["of"], pair["to"]) for pair in found["pairs"]] == [("b", "a"), ("c", "b")]
    found = limit.record({"a": [10.0, 11.0], "b": [15.0, 16.0], "c": [20.0, 21.0]}, Climbed)
    assert [(pair["of"], pair["to"]) for pair in found["pairs"]] == [("b", "a"), ("c", "b"), ("c", "a")]
    machine = {"processor": "x86_64", "cores": 2, "gpus": [], "torch": "2.11.0"}
    assert limit_plot.draw([json.loads(json.dumps(found))], machine, tmp_path) == ["limit.png"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU check: the stairs on a GPU train the same weights")
def test_every_stair_of_a_gpu_trains_the_same_weights(digits):
    device = torch.device("cuda")
    for climbed in limit.stairs(device):
        if climbed.obstacle is None:
            limit.checked(climbed, digits, device)
