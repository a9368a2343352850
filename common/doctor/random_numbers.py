"""Random numbers: dropout draws others on each rank.

The generators are the default ones of torch, of the GPU, of NumPy and of Python.
"""

import random
import sys
import zlib

import torch

from common.doctor.answers import Answer, Finding, Right, overall
from common.doctor.record import Draws, Record, across_ranks


def states(device: torch.device | None = None) -> dict[str, int]:
    """A fingerprint of each generator's state, the GPU's where `device` is one. Equal states draw equal numbers."""
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


def draws(records: list[Record]) -> Answer:
    answers: list[Answer] = []
    for generator in records[0].forward_draws:
        by_forward = across_ranks(record.forward_draws.get(generator, []) for record in records)
        same = sum(state in others for state, *others in by_forward)
        if by_forward and same == len(by_forward):
            answers.append(
                Finding(
                    f"all {same} forwards in training drew the same numbers on rank 0 and another one ({generator})",
                    "seed with seed + rank once the network is built",
                    pitfall="same_random_numbers",
                )
            )
        elif by_forward:
            answers.append(Right())
    return overall(answers, "no forward in training drew any")
