"""Steps: what each rank must do right by itself from one step of its optimizer to the next.

    check         right                                          wrong
    clipping      scale, backward, unscale_, clip, step          scale, backward, clip, step
    accumulation  steps of 3, 3, 3, 3, … micro-batches           steps of 1, 3, 3, 3, … micro-batches
    schedule      learning rates …, 0.3, 0.2, 0.1, 0             learning rates …, 0.2, 0, 0, 0, 0, 0

All ranks run one script and make such a mistake alike. So the checks look at rank 0, and compare it with no other.
The observers wrap GradScaler's methods and the clipping functions. `optimizers` notes the rates and forwards of a step.
"""

import inspect
import weakref
from itertools import pairwise
from typing import Any

import torch
from torch.amp import GradScaler

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.record import Record
from common.doctor.recorder import Recorder

SCALER_PARAMETERS = inspect.signature(GradScaler.__init__)
TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one


class ClippingWatch:
    """The clippings of a script, and whether a scaler had multiplied the gradients."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._enabled: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._undivided: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # whose gradients are still multiplied

    def after_init(self, _: None, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        given = SCALER_PARAMETERS.bind(scaler, *args, **kwargs).arguments
        # Without a GPU torch disables a scaler for CUDA, but the mistake is the same: so what the script asked counts.
        if given.get("enabled", True):
            self._enabled.add(scaler)

    def after_scale(self, _: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler in self._enabled:
            self._undivided.add(scaler)

    def before_division(self, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        self._undivided.discard(scaler)

    def before_clipping(self, *args: Any, **kwargs: Any) -> None:
        self._record.clippings += 1
        if self._undivided:
            self._record.clippings_of_scaled += 1


def watch(recorder: Recorder) -> None:
    clipping = ClippingWatch(recorder.record)
    recorder.watch(GradScaler, "__init__", after=clipping.after_init)
    recorder.watch(GradScaler, "scale", after=clipping.after_scale)
    recorder.watch(GradScaler, "unscale_", before=clipping.before_division)
    recorder.watch(GradScaler, "step", before=clipping.before_division)
    recorder.watch(torch.nn.utils, "clip_grad_norm_", before=clipping.before_clipping)
    recorder.watch(torch.nn.utils, "clip_grad_value_", before=clipping.before_clipping)


def check_clipping(records: list[Record]) -> Answer:
    first = records[0]
    if not first.clippings:
        return NotExamined("no gradients were clipped")
    if not first.clippings_of_scaled:
        return Right()
    return Finding(
        f"{first.clippings_of_scaled} of {first.clippings} times gradients were clipped that the scale had multiplied",
        "call `scaler.unscale_(optimizer)` between backward and clipping",
    )


def check_accumulation(records: list[Record]) -> Answer:
    first = records[0]
    trained = [network for network in first.networks if network.forwards]
    if len(trained) != 1 or first.steps < 4:
        return NotExamined("fewer than four steps of one network were seen")
    forwards = [0, *first.forwards_until_step]
    micro_batches = [later - earlier for earlier, later in pairwise(forwards)]
    if micro_batches[0] < micro_batches[1] == micro_batches[2]:
        return Finding(
            f"the steps are of {', '.join(map(str, micro_batches[:4]))}, … micro-batches",
            "count micro-batches from 1, and close the last window where the data end",
            pitfall="accumulation_off_by_one",
        )
    return Right()


def check_schedule(records: list[Record]) -> Answer:
    rates = records[0].learning_rates
    if all(of_step == rates[0] for of_step in rates):
        return NotExamined("the learning rate did not change")
    zeros = 0
    for of_step in reversed(rates):
        if any(of_step):
            break
        zeros += 1
    if zeros < TRAILING_ZEROS:
        return Right()
    return Finding(
        f"the learning rate is 0 in the last {zeros} of {len(rates)} steps",
        "write the schedule for as many calls of its `step` as there are",
        pitfall="schedule_too_fast",
    )
