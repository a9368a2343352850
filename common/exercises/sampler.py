"""The checker of `sampler`: which samples each rank gets at each time."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.eval_sampler import DistributedEvalSampler
from common.exercises.checker import Checker
from common.exercises.compare import at_step, flat, plain
from common.exercises.mistake import Mistake
from common.exercises.stage import load_name

SEED = 43  # with which no rank's share is by chance the even numbers, or half of the numbers in a row
# Which no number of ranks divides, and fewer samples than ranks.
CASES = {"11 samples on {} ranks": {"size": 11}, "2 samples on {} ranks": {"size": 2}}
# The epoch that `set_epoch` chooses before the sampler is listed, by the name of that moment in a finding.
EPOCHS = {"before the first set_epoch": None, "in epoch 0": 0, "in epoch 0, listed again": None, "in epoch 1": 1}


class Facts(NamedTuple):
    """The share of this rank at each time, and the length."""

    shares: list
    length: Any


def facts(sampler: Any) -> Facts:
    shares = []
    for epoch in EPOCHS.values():
        if epoch is not None:
            sampler.set_epoch(epoch)
        shares.append(plain(list(sampler)))
    return Facts(shares, plain(len(sampler)))


def reference(size: int) -> Facts:
    return facts(DistributedEvalSampler(range(size), dist.get_world_size(), dist.get_rank(), shuffle=True, seed=SEED))


def attempt(path: str, size: int) -> Facts:
    torch.manual_seed(dist.get_rank())  # ranks draw different random numbers
    solution = load_name(path, "ExactSampler")
    return facts(solution(range(100, 100 + size), dist.get_rank(), dist.get_world_size(), SEED))


def finding(made: Facts, expected: Facts) -> Mistake | None:
    for number, moment in enumerate(EPOCHS):
        shares = at_step(made.shares, number)
        right = at_step(expected.shares, number)
        if shares != right:
            once_each = sorted(flat(shares), key=str) == sorted(flat(right), key=str)
            mistake = Mistake("other order") if once_each else Mistake("not once each")
            return mistake.at(moment).with_values("samples", shares, {"they should be": right})
    if made.length != expected.length:
        return Mistake("length").with_values("lengths", made.length, {"they should be": expected.length})
    return None


CHECKER = Checker(reference, attempt, finding, cases=CASES)
