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
EPOCHS = 3


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
    """The shares of all ranks in each epoch, those that are right, and lengths."""
    solution = load_name(path, "ExactSampler")
    # No sample is equal to its number, so a sampler that yields the samples themselves is seen.
    dataset = [f"sample {number}" for number in range(size)]
    result: dict[str, list] = {"without_set_epoch": [], "lengths": []}
    samplers = []
    small = [DistributedEvalSampler(range(size), count, rank, shuffle=True, seed=SEED) for rank in range(count)]
    for rank in range(count):
        torch.manual_seed(rank)  # ranks draw different random numbers
        samplers.append(solution(dataset, rank, count, SEED))
        result["without_set_epoch"].append(listed(samplers[-1]))
        result["lengths"].append(plain(len(samplers[-1])))
    for name in ("shares", "again", "expected"):
        result[name] = []
    for epoch in range(EPOCHS):
        for sampler in [*samplers, *small]:
            sampler.set_epoch(epoch)
        result["shares"].append([listed(sampler) for sampler in samplers])
        result["again"].append([listed(sampler) for sampler in samplers])
        result["expected"].append([list(sampler) for sampler in small])
    return result


def finding(results: list[dict]) -> str | None:
    """What is wrong in the first epoch where something is."""
    [result] = results
    for epoch in range(EPOCHS):
        shares = result["shares"][epoch]
        expected = result["expected"][epoch]
        again = result["again"][epoch]
        if shares != expected:
            found = wrong_dealing(shares, expected) or wrong_order(result, epoch)
            return side_by_side(f"epoch {epoch}: {found}", shares, they_should_be=expected)
        if again != shares:
            title = (
                f"epoch {epoch}: list(sampler) gives something else the second time: __iter__ leaves the epoch as it"
                " is, and each call of it seeds a new generator with seed + epoch and returns a new iterator"
            )
            return side_by_side(title, again, the_first_time=shares)
    first_epoch = result["expected"][0]
    if result["without_set_epoch"] != first_epoch:
        title = "before set_epoch is called for the first time, the epoch is 0"
        return side_by_side(title, result["without_set_epoch"], they_should_be=first_epoch)
    lengths = list(map(len, first_epoch))
    if result["lengths"] != lengths:
        title = "len() is not the number of samples that the rank gets; loaders and progress bars believe it"
        return side_by_side(title, result["lengths"], they_should_be=lengths)
    return None


def wrong_dealing(shares: list[list], expected: list[list[int]]) -> str | None:
    """The mistake by which samples are dealt out more than once, or never."""
    dealt = flat(shares)
    twice = sorted({sample for sample in dealt if dealt.count(sample) > 1})
    missing = sorted(set(flat(expected)) - set(dealt))
    positions = "of W ranks, rank r gets the positions r, r + W, r + 2 W and so on"
    if twice and shares == shares[:1] * len(shares):
        return (
            "all ranks have the same samples: take the rank and the world size from the arguments of __init__, because"
            " here one process plays all ranks, and torch.distributed knows of one only"
        )
    if twice and missing:
        return (
            f"samples {twice} are dealt out more than once and {missing} never: the ranks do not cut the same order."
            f" Draw it from a generator of its own, seeded alike on all ranks; {positions}"
        )
    if twice:
        return f"samples {twice} are dealt out more than once: do not fill up the shares; {positions}"
    if missing:
        return f"samples {missing} are dealt out to nobody: a remainder belongs to the first ranks; {positions}"
    return None


def wrong_order(result: dict, epoch: int) -> str:
    """The mistake by which each sample is dealt out once, in another order."""
    shares = result["shares"][epoch]
    if epoch > 0 and shares == result["shares"][0]:
        return "the order is that of the epoch before: seed the generator with seed + epoch"
    return (
        "each sample is dealt out once, but not in the order that was asked for: torch.randperm of all samples, with a"
        " new generator in each epoch, seeded with seed + epoch. Rank r gets its positions r, r + W, r + 2 W and so on"
    )
