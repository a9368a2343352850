"""The checker of `sampler`: which samples each rank gets in three epochs."""

from typing import Any

import torch

from common.accelerator.sampler import DistributedEvalSampler
from common.exercises.compare import flat, plain, side_by_side
from common.exercises.stage import SolutionFailed, load_name

MINUTES = 15
READ = "02_ddp_raw/README.md"
SAME_AS = "DistributedEvalSampler (common/accelerator/sampler.py)"
WORLD_SIZES = (1,)  # process, which plays all ranks, one after another
SEED = 43  # with which no rank's share is by chance the even numbers, or half of the numbers in a row
CASES = {
    "8 samples for 2 ranks": {"size": 8, "count": 2},
    "10 samples for 3 ranks": {"size": 10, "count": 3},
    "2 samples for 3 ranks": {"size": 2, "count": 3},
}
# The epochs that are chosen by set_epoch, one after the other, by what a finding says of the time.
EPOCHS = {
    "before the first set_epoch": None,
    "in epoch 0": 0,
    "in epoch 0, when it is listed again": None,
    "in epoch 1": 1,
}


def listed(sampler: Any) -> list[int]:
    """What a sampler yields in an epoch.

    Raises:
        SolutionFailed: if these are no ints, or if it leaves torch's own random numbers elsewhere.
    """
    random_numbers = torch.get_rng_state()
    numbers = list(sampler)
    if not all(isinstance(number, int) for number in numbers):
        raise SolutionFailed(
            f"a sampler yields the numbers of samples as ints (Tensor.tolist() makes them of a tensor), and not a"
            f" {type(numbers[0]).__name__}"
        )
    if not torch.equal(torch.get_rng_state(), random_numbers):
        raise SolutionFailed(
            "the sampler has drawn from torch's global generator, or seeded it. The network's dropout draws from it"
            " too, and each rank has its own: draw the order from a new torch.Generator, and hand it to torch.randperm"
        )
    return numbers


def run(path: str, size: int, count: int) -> dict:
    """The shares of all ranks at each time, those that are right, and lengths."""
    solution = load_name(path, "ExactSampler")
    # No sample is equal to its number, so a sampler that yields the samples themselves is seen.
    dataset = [f"sample {number}" for number in range(size)]
    samplers = []
    small = []
    for rank in range(count):
        torch.manual_seed(rank)  # ranks draw different random numbers
        samplers.append(solution(dataset, rank, count, SEED))
        small.append(DistributedEvalSampler(range(size), count, rank, shuffle=True, seed=SEED))
    shares = []
    expected = []
    for epoch in EPOCHS.values():
        if epoch is not None:
            for sampler in samplers + small:
                sampler.set_epoch(epoch)
        shares.append([listed(sampler) for sampler in samplers])
        expected.append([listed(sampler) for sampler in small])
    return {"shares": shares, "expected": expected, "lengths": [plain(len(sampler)) for sampler in samplers]}


def finding(results: list[dict]) -> str | None:
    """What is wrong at the first time when something is."""
    [result] = results
    for time, shares, expected in zip(EPOCHS, result["shares"], result["expected"], strict=True):
        if shares != expected:
            return side_by_side(f"{time}: {wrong_shares(shares, expected)}", shares, they_should_be=expected)
    lengths = list(map(len, result["expected"][0]))
    if result["lengths"] != lengths:
        title = "len() is not the number of samples that the rank gets; loaders and progress bars believe it"
        return side_by_side(title, result["lengths"], they_should_be=lengths)
    return None


def wrong_shares(shares: list[list[int]], expected: list[list[int]]) -> str:
    dealt = flat(shares)
    twice = sorted({sample for sample in dealt if dealt.count(sample) > 1})
    missing = sorted(set(flat(expected)) - set(dealt))
    if twice or missing:
        return (
            f"samples {twice} are dealt out more than once and {missing} never: cut the same order on all ranks, and"
            " give rank r of W the positions r, r + W, r + 2 W and so on, without filling up or cutting off the shares"
        )
    return (
        "each sample is dealt out once, but not in the order that was asked for: torch.randperm of all samples, with a"
        " new generator in each call of __iter__, seeded with seed + epoch"
    )
