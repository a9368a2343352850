"""Observers of loss scaling: gradients that are clipped while they are still multiplied by the scale."""

import inspect
import weakref
from typing import Any

import torch
from torch.amp import GradScaler

from common.doctor.watcher import Watcher

CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


def install(watcher: Watcher) -> None:
    parameters = inspect.signature(GradScaler.__init__)
    wanted: weakref.WeakSet[GradScaler] = weakref.WeakSet()
    scaled: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # whose gradients have not been unscaled yet

    def note_scaler(_: None, *args: Any, **kwargs: Any) -> None:
        # Read from the arguments: without a GPU torch disables a scaler for CUDA, but the mistake is the same.
        arguments = parameters.bind(*args, **kwargs).arguments
        if arguments.get("enabled", True):
            wanted.add(arguments["self"])

    def note_scaled(_: Any, scaler: GradScaler, *args: Any) -> None:
        if scaler in wanted:
            scaled.add(scaler)

    def note_divided(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        scaled.discard(scaler)

    def note_clipping(*args: Any, **kwargs: Any) -> None:
        watcher.record.clippings += 1
        watcher.record.clipped_scaled += bool(scaled)

    watcher.watch(GradScaler, "__init__", after=note_scaler)
    watcher.watch(GradScaler, "scale", after=note_scaled)
    watcher.watch(GradScaler, "unscale_", before=note_divided)
    watcher.watch(GradScaler, "step", before=note_divided)
    for name in CLIPPING:
        watcher.watch(torch.nn.utils, name, before=note_clipping)
