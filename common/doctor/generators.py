"""The default random generators of torch, of the GPU, of NumPy and of Python: which of them something drew from."""

import random
import sys
import zlib

import torch

from common.doctor.record import Draws


def states(device: torch.device | None = None) -> dict[str, int]:
    """A fingerprint of the state of each, the GPU's where `device` is one. Equal states draw equal numbers."""
    found = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "python": hash(random.getstate()[1]),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)["state"]
        found["numpy"] = zlib.crc32(state["key"], state["pos"])
    if device is not None and device.type == "cuda":
        found["cuda"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes())
    return found


def note_draws(draws: Draws, before: dict[str, int], device: torch.device | None = None) -> None:
    """Add those of the states `before` whose generators have drawn since."""
    now = states(device)
    for kind, state in before.items():
        if now[kind] != state:
            draws.setdefault(kind, []).append(state)
