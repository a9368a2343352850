"""Random generators: the draws from the default ones of torch, of the GPU, of NumPy and of Python."""

import random
import zlib

import numpy as np
import torch

from common.doctor.record import Draw


def states(device: torch.device) -> dict[str, int]:
    """A fingerprint of each generator's state, the GPU's where `device` is one. Equal states draw equal numbers."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    found = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "NumPy": zlib.crc32(of_numpy["key"].tobytes(), of_numpy["pos"]),
        "Python": hash(random.getstate()[1]),
    }
    if device.type == "cuda":
        found["GPU"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes())
    return found


def draws_since(before: dict[str, int] | None, source: str, device: torch.device) -> list[Draw]:
    """The draws that have changed the states since `before`, which is None if the states were not recorded."""
    if before is None:
        return []
    now = states(device)
    return [Draw(source, generator, state) for generator, state in before.items() if now[generator] != state]
