"""Random numbers: dropout and augmentation draw other numbers on each rank. Generators in equal states draw alike."""

import pickle
import random
import zlib

import numpy as np
import torch

from common.doctor.checks.alignment import across_ranks, trained_networks
from common.doctor.record import Record
from common.doctor.results import Finding, Passed, Result, Skipped

MAX_DRAWS = 64  # noted of each source


def states(device: torch.device) -> dict[str, int]:
    """A fingerprint of each generator's state, the GPU's where `device` is one."""
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


def check_draws(records: list[Record]) -> Result:
    """A Finding if at all draws of a source two ranks have the same generator; else Passed if there were draws."""
    if any(record.is_tensor_parallel for record in records) or not trained_networks(records):
        return Skipped("ranks that do not train one and the same network, or share it out, may need equal numbers")
    result: Result = Skipped("no draw was seen in training forwards or in batches, and loader workers draw unseen")
    for source, generator in records[0].draws:
        draws = across_ranks(record.draws.get((source, generator), []) for record in records)
        same = sum(len(set(states_of_ranks)) < len(states_of_ranks) for states_of_ranks in draws)
        if draws and same == len(draws):
            text = f"the first {same} {source} after a step drew the same numbers on two ranks ({generator})"
            advice = "seed with seed + rank once the network is built"
            return Finding(text, advice, pitfall="same_random_numbers")
        if draws:
            result = Passed()
    return result
