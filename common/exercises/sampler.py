"""The checker of `sampler`: which samples each rank gets at each time."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from common.eval_sampler import DistributedEvalSampler
from common.exercises.compare import Mistake, as_numbers, by_rank, flat
from common.exercises.traffic import Traffic

SEED = 43
SIZES = (11, 2)  # 11 samples leave a remainder on two and three ranks, and 2 are fewer samples than three ranks
LENGTH = "len()"


def shares_of(sampler: Any, size: int) -> dict[str, list]:
    """This rank's share of `size` samples at several times, and its length."""
    shares = {f"{size} samples, before the first set_epoch": as_numbers(list(sampler))}
    sampler.set_epoch(0)
    shares[f"{size} samples, in epoch 0"] = as_numbers(list(sampler))
    shares[f"{size} samples, in epoch 0, listed again"] = as_numbers(list(sampler))
    sampler.set_epoch(1)
    shares[f"{size} samples, in epoch 1"] = as_numbers(list(sampler))
    shares[f"{size} samples, {LENGTH}"] = [len(sampler)]
    return shares


def reference() -> dict[str, list]:
    shares: dict[str, list] = {}
    for size in SIZES:
        shares |= shares_of(DistributedEvalSampler(range(size), shuffle=True, seed=SEED), size)
    return shares


def attempt(solution: ModuleType, _: Traffic) -> dict[str, list]:
    torch.manual_seed(dist.get_rank())  # ranks draw different random numbers
    state = torch.get_rng_state()
    shares: dict[str, list] = {}
    for size in SIZES:
        dataset = range(100, 100 + size)  # the numbers of the samples are not the samples
        shares |= shares_of(solution.ExactSampler(dataset, dist.get_rank(), dist.get_world_size(), SEED), size)
    if not torch.equal(torch.get_rng_state(), state):
        raise Mistake("torch's global generator was used: make a torch.Generator, and seed it with seed + epoch")
    return shares


def check(actual: list[dict[str, list]], expected: list[dict[str, list]]) -> None:
    for title in expected[0]:
        shares = [result[title] for result in actual]
        right = [result[title] for result in expected]
        if shares == right:
            continue
        if title.endswith(LENGTH):
            sentence = "this is not the number of samples that the rank gets; loaders and progress bars believe it"
        elif sorted(flat(shares), key=str) == sorted(flat(right), key=str):
            sentence = (
                "each sample is dealt out once, but not in the order that was asked for: torch.randperm of all "
                "samples, with a new generator in each call of __iter__, seeded with seed + epoch"
            )
        else:
            sentence = (
                "cut the same order on all ranks, and give rank r of W the positions r, r + W, r + 2 W and so on, "
                "without filling up or cutting off the shares, as DistributedEvalSampler does in common/eval_sampler.py"
            )
        raise Mistake(f"{title}: {sentence}", by_rank(shares) | {"they should be": right})
