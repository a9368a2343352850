"""Random numbers: dropout draws others on each rank.

The generators are torch's default ones, of the CPU and of the GPU.
"""

import zlib

import torch

from common.doctor.answers import Answer, Finding, Right, overall
from common.doctor.record import Draws, Record, across_ranks


def states(device: torch.device) -> dict[str, int]:
    """A fingerprint of the state of each generator from which a forward draws. Equal states draw equal numbers."""
    found = {"CPU": zlib.crc32(torch.get_rng_state().numpy().tobytes())}
    if device.type == "cuda":
        found["GPU"] = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes())
    return found


def note_draws(draws: Draws, before: dict[str, int], device: torch.device) -> None:
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
