"""Random numbers: dropout and augmentation draw others on each rank.

The generators are the default ones of torch, of the GPU, of NumPy and of Python.
"""

import random
import zlib

import numpy as np
import torch

from common.doctor.answers import Answer, Finding, Right, overall
from common.doctor.record import Draws, Record, across_ranks


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


def note_draws(draws: Draws, before: dict[str, int], device: torch.device) -> None:
    """Add those of the states `before` whose generators have drawn since."""
    now = states(device)
    for kind, state in before.items():
        if now[kind] != state:
            draws.setdefault(kind, []).append(state)


def check_draws(records: list[Record]) -> Answer:
    answers = _answers_about("forwards in training", [record.forward_draws for record in records])
    answers += _answers_about("batches", [record.batch_draws for record in records])
    return overall(answers, "neither forwards in training nor the reading of batches drew any")


def _answers_about(source: str, by_rank: list[Draws]) -> list[Answer]:
    """An answer about each generator from which all ranks drew."""
    answers: list[Answer] = []
    for generator in by_rank[0]:
        by_draw = across_ranks(of_rank.get(generator, []) for of_rank in by_rank)
        same = sum(state in others for state, *others in by_draw)
        if by_draw and same == len(by_draw):
            answers.append(
                Finding(
                    f"all {same} {source} drew the same numbers on rank 0 and another one ({generator})",
                    "seed with seed + rank once the network is built",
                    pitfall="same_random_numbers",
                )
            )
        elif by_draw:
            answers.append(Right())
    return answers
