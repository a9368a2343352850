"""The checker of `prepare`: which samples each rank reads, with which weights it begins, and which come out."""

from collections.abc import Iterable
from datetime import timedelta
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from common.exercises.compare import flat, near, plain, shown, side_by_side
from common.exercises.stage import SolutionFailed, load_name
from common.process_group import all_gather_object
from common.small.accelerator import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs

MINUTES = 25
READ = "03_accelerate/README.md"
SAME_AS = "the small Accelerator (common/small/accelerator.py)"
WORLD_SIZES = (2, 3)
SAMPLES = 18
BATCH_SIZE = 6  # of all ranks
# Of the loader that shuffles: so many that a rank does not by chance have the same ones as without shuffling.
SHUFFLED_SAMPLES = 24


class Numbers(list[int]):
    """The numbers from 0 on, and which of them were read."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def as_batch(numbers: list[int]) -> dict[str, torch.Tensor]:
    """A batch of samples in which each number is the input of one."""
    samples = torch.tensor(numbers)
    inputs = samples[:, None].double() / SAMPLES
    return {"samples": samples, "inputs": inputs, "targets": 3 - inputs**2}


def objects() -> list[Any]:
    """What a script hands to `prepare`, and gets back, in this order: a loader, a network of one weight, its optimizer
    and a loader that shuffles.
    """
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0 + dist.get_rank())  # nobody has made them equal
    numbers: Any = Numbers(SAMPLES)
    more_numbers: Any = Numbers(SHUFFLED_SAMPLES)
    loader: Any = DataLoader(numbers, BATCH_SIZE, collate_fn=as_batch)
    shuffled: Any = DataLoader(more_numbers, BATCH_SIZE, collate_fn=as_batch, shuffle=True)
    return [loader, model, SGD(model.parameters(), lr=0.1), shuffled]


def prepared_by_the_small_one() -> list[Any]:
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
    group = InitProcessGroupKwargs(timedelta(seconds=60))
    with mock.patch.object(dist, "init_process_group"):  # this rank is in a group already
        accelerator = Accelerator(True, config, [group])
    return accelerator.prepare(*objects())


def samples_in(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return plain(batch["samples"])
    raise SolutionFailed(
        f"a batch is {plain(batch)}, and not what the loader's own collate_fn makes of the samples: hand `collate_fn`"
        " on to the new loader, and share out the numbers of the samples, by a sampler, before they become a batch"
    )


def trained(batches: Iterable[Any], model: Any, optimizer: Any) -> list:
    """The weights after each step of a script's training loop."""
    weights = []
    for batch in batches:
        F.mse_loss(model(batch["inputs"]), batch["targets"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append([plain(parameter.flatten()) for parameter in model.parameters()])
    return weights


def run(path: str) -> dict:
    """On one rank: what the prepared objects are and do, and the weights that are right."""
    expected = trained(*prepared_by_the_small_one()[:3])
    given = objects()
    prepared = load_name(path, "prepare")(*given)
    kinds = (Iterable, nn.Module, SGD, Iterable)
    if not isinstance(prepared, list) or len(prepared) != 4 or not all(map(isinstance, prepared, kinds)):
        raise SolutionFailed(
            f"prepare was given a DataLoader, a Linear, an SGD and a DataLoader; it returned {shown(plain(prepared))}:"
            " it has to return a list of as many objects, each in the place in which it came"
        )
    loader, model, optimizer, shuffled = prepared
    batches = list(loader)
    samples = list(map(samples_in, batches))
    read = sorted(set(given[0].dataset.read))
    of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # A rank with more batches than another one would wait in backward for ever.
    equally_many = len(set(all_gather_object(len(batches)))) == 1
    return {
        "weights": trained(batches, model, optimizer) if equally_many else [],
        "expected": expected,
        "same_optimizer": optimizer is given[2],
        "same_parameters": of_optimizer == {id(parameter) for parameter in model.parameters()},
        "samples": samples,
        "shuffled": list(map(samples_in, shuffled)),
        "read": read,
    }


def finding(results: list[dict]) -> str | None:
    """The first thing that is wrong: the optimizer, the samples, the training."""
    if not all(result["same_parameters"] for result in results):
        return (
            "the optimizer does not hold the parameters of the network that came back, so its steps do not move them:"
            " wrap the very network that was given, and no copy, and return the very optimizer"
        )
    if not all(result["same_optimizer"] for result in results):
        return (
            "the optimizer that came back is another one than was given, without its settings and its state. It needs"
            " no change, so return the very object: equal weights and averaged gradients make equal steps on all ranks"
        )
    return wrong_samples(results) or wrong_weights(results) or wrong_shuffle(results)


def wrong_samples(results: list[dict]) -> str | None:
    """A finding about the samples of each step of the loader that does not shuffle."""
    samples = [result["samples"] for result in results]
    read = [result["read"] for result in results]
    batches = [list(range(start, start + BATCH_SIZE)) for start in range(0, SAMPLES, BATCH_SIZE)]
    step_size = len(flat(joined(samples)[:1]))
    if joined(samples) == batches:
        if read == [sorted(flat(of_rank)) for of_rank in samples]:
            return None
        title = (
            "each rank has the samples of its share, but it has read others from the dataset too, and thrown them away:"
            " choose the numbers of the samples before they are read; the samples read by"
        )
        return side_by_side(title, read)
    if len(set(map(len, samples))) > 1:
        title = (
            "a rank had fewer batches than another one, which waits for it in backward for ever: share out each batch,"
            " so that all ranks take part in every step"
        )
    elif samples == samples[:1] * len(samples):
        title = (
            "every rank has the same samples, so all compute the same, and two devices are no faster than one: a"
            " sampler has to deal them out (DistributedSampler does), batch_size // world size to a rank in each step"
        )
    elif step_size > BATCH_SIZE:
        title = (
            f"a step takes {step_size} samples, and an epoch has fewer steps: the loader's batch_size, {BATCH_SIZE}, is"
            " that of all ranks, so that of one rank is batch_size // world size"
        )
    else:
        title = (
            "in each step the ranks together do not have the samples of one batch: keep the loader's order where it"
            " does not shuffle (DistributedSampler does, if it is told shuffle=False), and share out each batch"
        )
    return side_by_side(f"{title}; the samples of each step of", samples, batches_of_the_original_loader=batches)


def wrong_weights(results: list[dict]) -> str | None:
    """A finding about the training with the prepared objects."""
    weights = [result["weights"] for result in results]
    expected = results[0]["expected"]
    if near(weights, [expected] * len(results)):
        return None
    title = (
        "the weights are not those of one device: DistributedDataParallel gives all ranks the weights of rank 0, and"
        " averages their gradients, so that the ranks do not drift apart"
    )
    return side_by_side(f"{title}; the weight after each step:", weights, it_should_be=expected)


def wrong_shuffle(results: list[dict]) -> str | None:
    """A finding about the samples of the loader that shuffles."""
    samples = [result["shuffled"] for result in results]
    of_all = flat(joined(samples))
    if sorted(of_all) != list(range(SHUFFLED_SAMPLES)):
        title = (
            "with a loader that shuffles some samples are on two ranks and others on none, because each rank has drawn"
            " an order of its own: draw it from a generator that is seeded alike on all ranks (DistributedSampler does)"
        )
    elif of_all == sorted(of_all):
        title = "the loader shuffles, and the prepared one does not: look at whether its sampler is a RandomSampler"
    else:
        return None
    return side_by_side(f"{title}; the samples of each step of", samples)


def joined(samples: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each step on all ranks, in the order of the dataset."""
    steps = zip_longest(*samples, fillvalue=[])
    return [sorted(flat(shares)) for shares in steps]
