"""Seeds and states of random generators, and the same state on all processes."""

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..operations import broadcast
from ..state import PartialState
from .dataclasses import RNGType


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy and torch, on every device.

    Args:
        seed: the same on all processes unless `device_specific`.
        device_specific: add the rank to the seed, so that processes draw different dropout. The order in which
            prepared loaders visit the data is rank 0's on every process all the same.
        deterministic: make torch raise where it has no deterministic algorithm.
    """
    if device_specific:
        seed += PartialState().process_index
    random.seed(seed)
    with suppress(ModuleNotFoundError):
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every process the state that rank 0's generator has: torch's, CUDA's, or `generator`.

    Raises:
        ValueError: for an unknown type.
        AssertionError: for `generator` where there is none.
    """
    write: Callable[[torch.Tensor], Any]
    rng_type = RNGType(rng_type)
    if rng_type == RNGType.GENERATOR:
        if generator is None:
            raise AssertionError("Need a generator to synchronize its seed.")
        read, write = generator.get_state, generator.set_state
    elif rng_type == RNGType.TORCH:
        read, write = torch.get_rng_state, torch.set_rng_state
    else:
        read, write = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    write(broadcast(read().to(PartialState().device)).cpu())


def synchronize_rng_states(rng_types: list[str | RNGType], generator: torch.Generator | None = None) -> None:
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def get_random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch and the CUDA `device`, for `set_random_states`."""
    states = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy_random_seed"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(device: torch.device, states: dict[str, Any]) -> None:
    """Put the generators back into the states that `get_random_states` has read."""
    random.setstate(states["random_state"])
    torch.set_rng_state(states["torch_manual_seed"])
    if "numpy_random_seed" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy_random_seed"])
    if "torch_cuda_manual_seed" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["torch_cuda_manual_seed"], device)
