"""Optimizers: their steps, schedules and micro-batches, and the scale at which gradients are clipped."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from common.doctor.checks import clipping, optimizers
from common.doctor.record import Network, Record, Step
from common.doctor.results import Finding, Passed, Skipped


@pytest.mark.parametrize("micro_batches, kind", [([1, 0, 3, 0, 3], Finding), ([3, 3, 3], Passed), ([1, 3], Skipped)])
def test_the_first_window_of_accumulation_is_as_long_as_the_next(micro_batches, kind):
    steps = [Step([0.1], count) for count in micro_batches]
    first = Record(0, steps=steps, networks=[Network(forwards=12)])
    assert isinstance(optimizers.check_accumulation([first]), kind)
    first.networks.append(Network(forwards=12))
    assert optimizers.check_accumulation([first]).reason.endswith("but 2 were trained")


@pytest.mark.parametrize("rates, kind", [([0.2, 0.1, 0], Passed), ([0.1, 0, 0, 0], Finding), ([0, None], Passed)])
def test_a_schedule_lasts_as_long_as_the_training(rates, kind):
    of_another = [Step([0.5, 0.5], 1, optimizer=1)] * 3  # which stays as it is
    of_one = [Step([rate], 1) for rate in rates]
    assert isinstance(optimizers.check_schedule([Record(0, steps=of_one + of_another)]), kind)


def test_the_optimizer_in_a_zero_redundancy_optimizer_is_followed_to_the_last_step(recorder, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    observer = optimizers.OptimizerObserver(recorder, {}, last_step=3)
    inner, outer = (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1) for _ in range(2))
    inner.param_groups[0]["lr"] = None  # as Adafactor has it
    outer.optim = inner
    for optimizer in [inner, outer] * 3:
        observer.after_step(optimizer, (), {})
    assert (len(recorder.record.steps), recorder.record.end.reason, ended) == (3, "steps", [0])


@pytest.mark.parametrize(
    "calls, enabled, kind",
    [
        pytest.param("scale unscale_ clip step", True, Passed, id="divided before"),
        pytest.param("scale clip step", True, Finding, id="not divided"),
        pytest.param("scale step update scale clip", True, Finding, id="not divided after a step"),
        pytest.param("scale_sharded clip", True, Finding, id="not divided by the scaler of FSDP"),
        pytest.param("scale clip step", False, Passed, id="never multiplied"),
        pytest.param("scale unscale_ scale_of_other clip", True, Passed, id="another scaler multiplies last"),
    ],
)
def test_gradients_are_clipped_at_their_own_scale(calls, enabled, kind, recorder):
    clipping.ClippingObserver(recorder).install()
    scaler, other = (torch.amp.GradScaler("cpu", 65536.0, 2.0, 0.5, 2000, enabled) for _ in range(2))
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    do = {
        "scale": lambda: scaler.scale(weight.sum()).backward(),
        "scale_sharded": lambda: ShardedGradScaler("cpu").scale(weight.sum()).backward(),
        "scale_of_other": lambda: other.scale(torch.ones(1)),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "clip": lambda: nn.utils.clip_grad_norm_([weight], 1.0),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
    }
    for call in calls.split():
        do[call]()
    assert isinstance(clipping.check_clipping([recorder.record]), kind)
