"""Random numbers: dropout and augmentation draw others on each rank.

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
    answers = answers_about("forwards in training", [record.forward_draws for record in records])
    answers += answers_about("batches", [record.batch_draws for record in records])
    return overall(answers, "neither forwards in training nor the reading of batches drew any")


def answers_about(source: str, by_rank: list[Draws]) -> list[Answer]:
    """An answer about each generator that all ranks drew from."""
    answers: list[Answer] = []
    for generator in by_rank[0]:
        together = across_ranks(of_rank.get(generator, []) for of_rank in by_rank)
        same = sum(state in others for state, *others in together)
        if together and same == len(together):
            answers.append(
                Finding(
                    f"all {same} {source} drew the same numbers on rank 0 and another one ({generator})",
                    "seed with seed + rank once the network is built",
                    pitfall="same_random_numbers",
                )
            )
        elif together:
            answers.append(Right())
    return answers
