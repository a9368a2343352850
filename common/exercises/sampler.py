"""The checker of `sampler`: which samples each rank gets in two epochs."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler, TensorDataset

from common.accelerator.sampler import DistributedEvalSampler
from common.exercises.compare import agreed, flat, plain, side_by_side
from common.exercises.stage import SolutionFailed, load_name, number_of_ranks, on_ranks

MINUTES = 15
READ = "02_ddp_raw/README.md"
SAME_AS = "DistributedEvalSampler (common/accelerator/sampler.py) and, where shares are equal, DistributedSampler"
SEED = 43  # with which no rank's share is by chance the even numbers, or half of the numbers in a row
CASES = ((8, 2), (10, 3), (2, 3))  # samples and ranks: equal shares, a remainder of one, fewer samples than ranks
EPOCHS = 3


def expected_share(size: int, world_size: int, rank: int, epoch: int) -> list[int]:
    ours = DistributedEvalSampler(range(size), world_size, rank, shuffle=True, seed=SEED)
    torchs: DistributedSampler = DistributedSampler(TensorDataset(torch.arange(size)), world_size, rank, seed=SEED)
    ours.set_epoch(epoch)
    torchs.set_epoch(epoch)
    shares = {"whole": list(ours)}
    if size % world_size == 0:
        shares["real"] = list(torchs)
    return agreed(**shares)


def number_or_its_type(entry: object) -> int | str:
    """What a sampler has drawn; where that is no sample number, which type it has instead."""
    return entry if isinstance(entry, int) else f"a {type(entry).__name__}"


def listed(sampler: Any) -> list[int | str]:
    """What a sampler yields in an epoch.

    Raises:
        SolutionFailed: if its `__iter__` returns no iterator, or leaves torch's own random numbers elsewhere.
    """
    random_numbers = torch.get_rng_state()
    iterator = sampler.__iter__()
    if not hasattr(iterator, "__next__"):
        raise SolutionFailed(
            f"__iter__ returned a {type(iterator).__name__}, of which there is no next one: return iter(...) of it,"
            " or yield its entries"
        )
    numbers = [number_or_its_type(entry) for entry in iterator]
    if not torch.equal(torch.get_rng_state(), random_numbers):
        raise SolutionFailed(
            "the sampler has drawn from torch's global generator, or seeded it. The network's dropout draws from it"
            " too, and each rank has its own: draw the order from a new torch.Generator, and hand it to torch.randperm"
        )
    return numbers


def run(path: str) -> list[dict]:
    """For each case: the shares of all ranks in each epoch, played one after another in one process."""
    solution = load_name(path, "ExactSampler")
    found = []
    for size, world_size in CASES:
        # No sample is equal to its number, so a sampler that yields the samples themselves is seen.
        dataset = [f"sample {number}" for number in range(size)]
        result: dict[str, list] = {"shares": [], "again": [], "without_set_epoch": [], "lengths": [], "expected": []}
        for rank in range(world_size):
            torch.manual_seed(rank)  # ranks draw different random numbers
            sampler = solution(dataset, rank, world_size, SEED)
            shares = []
            again = []
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                shares.append(listed(sampler))
                again.append(listed(sampler))
            result["shares"].append(shares)
            result["again"].append(again)
            result["without_set_epoch"].append(listed(solution(dataset, rank, world_size, SEED)))
            result["lengths"].append(plain(len(sampler)))
        for rank in range(world_size):
            result["expected"].append([expected_share(size, world_size, rank, epoch) for epoch in range(EPOCHS)])
        found.append(result)
    return found


def check(path: Path) -> list[str]:
    """On one process, which plays two and three ranks."""
    try:
        [results] = on_ranks(1, run, path)
    except SolutionFailed as failure:
        return [str(failure)]
    for (size, world_size), result in zip(CASES, results, strict=True):
        found = finding(size, result)
        if found:
            return [f"{size} samples on {number_of_ranks(world_size)}: {found}"]
    return []


def finding(size: int, result: dict) -> str | None:
    """What is wrong in one case, in the first epoch where something is."""
    for epoch in range(EPOCHS):
        shares = [of_rank[epoch] for of_rank in result["shares"]]
        expected = [of_rank[epoch] for of_rank in result["expected"]]
        if shares != expected:
            title = f"epoch {epoch}: {wrong_shares(size, epoch, result)}"
            return side_by_side(title, shares, they_should_be=expected)
        again = [of_rank[epoch] for of_rank in result["again"]]
        if again != shares:
            title = (
                f"epoch {epoch}: list(sampler) gives something else the second time: __iter__ leaves the epoch as it"
                " is, and each call of it seeds a new generator with seed + epoch and returns a new iterator"
            )
            return side_by_side(title, again, the_first_time=shares)
    first_epoch = [of_rank[0] for of_rank in result["expected"]]
    if result["without_set_epoch"] != first_epoch:
        title = "before set_epoch is called for the first time, the epoch is 0"
        return side_by_side(title, result["without_set_epoch"], they_should_be=first_epoch)
    true_lengths = [len(of_rank[0]) for of_rank in result["expected"]]
    if result["lengths"] != true_lengths:
        title = "len() is not the number of samples that the rank gets; loaders and progress bars believe it"
        return side_by_side(title, result["lengths"], they_should_be=true_lengths)
    return None


def wrong_shares(size: int, epoch: int, result: dict) -> str:
    shares = [of_rank[epoch] for of_rank in result["shares"]]
    expected = [of_rank[epoch] for of_rank in result["expected"]]
    dealt = flat(shares)
    if not all(isinstance(sample, int) for sample in dealt):
        return (
            "a sampler yields the numbers of samples as ints (Tensor.tolist() makes them of a tensor), and not the"
            " samples"
        )
    if sorted(dealt) != list(range(size)):
        return wrong_dealing(size, shares, expected)
    return wrong_order(size, epoch, result)


def wrong_dealing(size: int, shares: list[list[int]], expected: list[list[int]]) -> str:
    """The mistake by which samples are dealt out more than once, or never."""
    dealt = flat(shares)
    twice = sorted({sample for sample in dealt if dealt.count(sample) > 1})
    missing = sorted(set(range(size)) - set(dealt))
    if twice and shares == shares[:1] * len(shares):
        return (
            "all ranks have the same samples: take the rank and the world size from the arguments of __init__, because"
            " here one process plays all ranks, and torch.distributed knows of one only"
        )
    if twice and missing:
        return (
            f"samples {twice} are dealt out more than once and {missing} never: the ranks do not cut the same order."
            " Draw it from a generator of its own, seeded alike on all ranks"
        )
    sizes = {len(share) for share in shares}
    if twice and len(sizes) > 1:
        return (
            f"samples {twice} are dealt out more than once: of W ranks, rank r gets the positions r, r + W, r + 2 W and"
            f" so on, and W is the world size, here {len(shares)}"
        )
    if twice:
        return f"samples {twice} are dealt out more than once: do not fill up the shares"
    order = [expected[position % len(expected)][position // len(expected)] for position in range(size)]
    positions = [order.index(sample) for sample in missing]
    return (
        f"samples {missing}, at the positions {positions} of the order, are dealt out to nobody: rank 0 begins at"
        " position 0, and a remainder belongs to the first ranks"
    )


def wrong_order(size: int, epoch: int, result: dict) -> str:
    """The mistake by which each sample is dealt out once, in another order."""
    shares = [of_rank[epoch] for of_rank in result["shares"]]
    expected = [of_rank[epoch] for of_rank in result["expected"]]
    if epoch > 0 and shares == [of_rank[0] for of_rank in result["shares"]]:
        return "the order is that of the epoch before: seed the generator with seed + epoch"
    if all(share == sorted(share) for share in shares):
        return "each sample is dealt out once, but the order is not shuffled"
    same_order = all(of_rank[0] == of_rank[1] for of_rank in result["shares"])
    same_samples = all(set(of_rank[0]) == set(of_rank[1]) for of_rank in result["shares"])
    if same_samples and not same_order:
        return "each rank has the same samples in every epoch: shuffle all samples, and then deal out their order"
    if list(map(sorted, shares)) == list(map(sorted, expected)):
        return "each rank has its samples, in another order"
    return (
        "each sample is dealt out once, but not in the order that was asked for: torch.randperm with a new generator in"
        " each epoch, seeded with seed + epoch, of which rank r gets the positions r, r + W, r + 2 W and so on"
    )
