"""Random generators: the draws from the default ones of torch, of the GPU, of NumPy and of Python."""

import pickle
import random
import zlib

import numpy as np
import torch

from common.doctor.record import MAX_DRAWS, Record


def states(device: torch.device) -> dict[str, int]:
    """A fingerprint of each generator's state, the GPU's where `device` is one. Equal states draw equal numbers."""
    found = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        "NumPy": zlib.crc32(pickle.dumps(np.random.get_state(legacy=False)["state"])),
        "Python": hash(random.getstate()[1]),
    }
    if device.type == "cuda":
        found["GPU"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes())
    return found


def note_draws(record: Record, source: str, before: dict[str, int], device: torch.device) -> None:
    """Record the generators that have drawn since the states `before`. Until the first step lazy layers draw alike."""
    of_source = [draws for (drawer, _), draws in record.draws.items() if drawer == source]
    if not record.steps or not before or sum(map(len, of_source)) >= MAX_DRAWS:
        return
    now = states(device)
    for generator, state in before.items():
        if now[generator] != state:
            record.draws.setdefault((source, generator), []).append(state)
