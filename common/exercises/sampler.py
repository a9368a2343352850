"""The checker of `sampler`: which samples each rank gets at each time."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.eval_sampler import DistributedEvalSampler
from common.exercises.compare import at_step, flat, plain
from common.exercises.exercise import Exercise
from common.exercises.mistake import Mistake, SolutionFailed
from common.exercises.stage import load_name

SEED = 43  # with which no rank's share is by chance the even numbers, or half of the numbers in a row
# Which no number of ranks divides, and fewer samples than ranks.
CASES = {"11 samples on {} ranks": {"size": 11}, "2 samples on {} ranks": {"size": 2}}
# The epochs that are chosen by set_epoch, one after the other, by what a finding says of the time.
EPOCHS = {
    "before the first set_epoch": None,
    "in epoch 0": 0,
    "in epoch 0, when it is listed again": None,
    "in epoch 1": 1,
}


class Facts(NamedTuple):
    """The share of this rank at each time, and the length."""

    shares: list
    length: Any


def facts(sampler: Any) -> Facts:
    shares = []
    for epoch in EPOCHS.values():
        if epoch is not None:
            sampler.set_epoch(epoch)
        shares.append(listed(sampler))
    return Facts(shares, plain(len(sampler)))


def reference(size: int) -> Facts:
    return facts(DistributedEvalSampler(range(size), dist.get_world_size(), dist.get_rank(), shuffle=True, seed=SEED))


def attempt(path: str, size: int) -> Facts:
    # No sample is equal to its number, so a sampler that yields the samples themselves is seen.
    dataset = [f"sample {number}" for number in range(size)]
    torch.manual_seed(dist.get_rank())  # ranks draw different random numbers
    solution = load_name(path, "ExactSampler")
    return facts(solution(dataset, dist.get_rank(), dist.get_world_size(), SEED))


def listed(sampler: Any) -> list[int]:
    """What a sampler yields in an epoch.

    Raises:
        SolutionFailed: if these are no ints, or if it leaves torch's own random numbers elsewhere.
    """
    random_numbers = torch.get_rng_state()
    numbers = list(sampler)
    if not all(isinstance(number, int) for number in numbers):
        raise SolutionFailed(Mistake("no ints"))
    if not torch.equal(torch.get_rng_state(), random_numbers):
        raise SolutionFailed(Mistake("global generator"))
    return numbers


def finding(made: Facts, expected: Facts) -> Mistake | None:
    for number, time in enumerate(EPOCHS):
        shares = at_step(made.shares, number)
        right = at_step(expected.shares, number)
        if shares != right:
            return wrong_shares(shares, right).at(time).with_values("samples", shares, {"they should be": right})
    if made.length != expected.length:
        return Mistake("length").with_values("lengths", made.length, {"they should be": expected.length})
    return None


def wrong_shares(shares: list[list[int]], expected: list[list[int]]) -> Mistake:
    dealt = flat(shares)
    twice = sorted({sample for sample in dealt if dealt.count(sample) > 1})
    missing = sorted(set(flat(expected)) - set(dealt))
    if twice or missing:
        return Mistake("not once each").at(f"samples {twice} are dealt out more than once and {missing} never")
    return Mistake("other order")


EXERCISE = Exercise(
    minutes=15,
    read="02_ddp_raw/README.md",
    same_as="DistributedEvalSampler (common/eval_sampler.py)",
    world_sizes=(2, 3),
    reference=reference,
    attempt=attempt,
    finding=finding,
    cases=CASES,
)
