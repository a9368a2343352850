"""The states of the random generators that a training draws from: torch's, Python's and NumPy's default ones."""

import random
import sys
import zlib

import torch

from common.doctor.record import Generators


def generators(device: torch.device | None = None) -> Generators:
    """A fingerprint of each state; equal ones draw equal numbers. Of `device` too, if it is a GPU."""
    states = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "python": hash(random.getstate()[1]),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)["state"]
        states["numpy"] = zlib.crc32(state["key"], state["pos"])
    if device is not None and device.type == "cuda":
        states["cuda"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states
