"""Clipping: gradients are clipped at their own size, and not while the scale of a GradScaler multiplies them."""

import inspect
import weakref
from typing import Any, Literal

import torch
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from common.doctor.record import Record
from common.doctor.recorder import Recorder
from common.doctor.results import Finding, Passed, Result, Skipped


class ClippingObserver:
    """The clippings of a script.

    scale  backward  unscale_               clip  right
    scale  backward                         clip  wrong
    scale  backward  unscale_  scale        clip  right: another scaler may have multiplied other gradients
    scale  backward  step  scale  backward  clip  wrong: a step divides too, but its end begins the next gradients
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._enabled: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        # What scalers have done to the gradients since the last step.
        self._gradients: Literal["unchanged", "multiplied", "divided"] = "unchanged"

    def install(self) -> None:
        self._recorder.wrap(GradScaler, "__init__", after=self.after_init)
        for scaler_class in (GradScaler, ShardedGradScaler):  # that of FSDP has these two for itself
            self._recorder.wrap(scaler_class, "scale", after=self.after_scale)
            self._recorder.wrap(scaler_class, "unscale_", before=self.before_division)
        self._recorder.wrap(GradScaler, "step", after=self.after_step)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):  # a script may call the functions of either
            self._recorder.wrap(module, "clip_grad_norm_", before=self.before_clipping)
            self._recorder.wrap(module, "clip_grad_value_", before=self.before_clipping)

    def after_init(self, _: None, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(GradScaler.__init__).bind(scaler, *args, **kwargs).arguments
        # Without a GPU torch disables a scaler for CUDA, but the mistake is the same: so what the script asked counts.
        if given.get("enabled", True):
            self._enabled.add(scaler)

    def after_scale(self, _: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler in self._enabled and self._gradients == "unchanged":
            self._gradients = "multiplied"

    def before_division(self, *args: Any, **kwargs: Any) -> None:
        self._gradients = "divided"

    def after_step(self, *args: Any, **kwargs: Any) -> None:
        self._gradients = "unchanged"

    def before_clipping(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.record.clippings.append(self._gradients == "multiplied")


def check_clipping(records: list[Record]) -> Result:
    clippings = records[0].clippings  # the ranks run one script, and make this mistake alike
    if not clippings:
        return Skipped("rank 0 was not seen to call torch.nn.utils.clip_grad_…")
    scaled = sum(clippings)
    if not scaled:
        return Passed()
    text = f"{scaled} of {len(clippings)} times gradients were clipped that the scale had multiplied"
    return Finding(text, "call `scaler.unscale_(optimizer)` between backward and clipping")
