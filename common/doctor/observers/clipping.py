"""Clipping: the gradients that are clipped while the scale of a GradScaler multiplies them."""

import inspect
import weakref
from typing import Any

import torch
from torch.amp import GradScaler

from common.doctor.observers.recorder import Recorder

SCALER_PARAMETERS = inspect.signature(GradScaler.__init__)


class ClippingObserver:
    """The clippings of a script, which may have several scalers, one for each network.

    scale  backward  unscale_  clip   right
    scale  backward  clip             wrong: the last call of a scaler before it was `scale`
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._enabled: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._are_scaled = False  # True if the last call of an enabled scaler was `scale`

    def install(self) -> None:
        self._recorder.wrap(GradScaler, "__init__", after=self.after_init)
        self._recorder.wrap(GradScaler, "scale", after=self.after_scale)
        self._recorder.wrap(GradScaler, "unscale_", before=self.before_division)
        self._recorder.wrap(GradScaler, "step", before=self.before_division)
        self._recorder.wrap(torch.nn.utils, "clip_grad_norm_", before=self.before_clipping)
        self._recorder.wrap(torch.nn.utils, "clip_grad_value_", before=self.before_clipping)

    def after_init(self, _: None, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        given = SCALER_PARAMETERS.bind(scaler, *args, **kwargs).arguments
        # Without a GPU torch disables a scaler for CUDA, but the mistake is the same: so what the script asked counts.
        if given.get("enabled", True):
            self._enabled.add(scaler)

    def after_scale(self, _: Any, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler in self._enabled:
            self._are_scaled = True

    def before_division(self, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        if scaler in self._enabled:
            self._are_scaled = False

    def before_clipping(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.record.clippings.append(self._are_scaled)
