"""The checker of `prepare`: which samples each rank reads, with which weights it begins, and which come out."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from common.exercises.compare import flat, near, plain, side_by_side, weights
from common.exercises.stage import SolutionFailed, load_name

MINUTES = 25
READ = "03_accelerate/README.md"
SAME_AS = "one device. common/small/accelerator.py has a `prepare` to read"
WORLD_SIZES = (2, 3)
SAMPLES = 24  # so many that a rank does not by chance have the same ones with and without shuffling
BATCH_SIZE = 6  # of all ranks


class Numbers(list[int]):
    """The numbers from 0 on, and which of them were read."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES))
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def as_batch(numbers: list[int]) -> dict[str, torch.Tensor]:
    """A batch of samples in which each number is the input of one."""
    samples = torch.tensor(numbers)
    inputs = samples[:, None].double() / SAMPLES
    return {"samples": samples, "inputs": inputs, "targets": 3 - inputs**2}


def loader(shuffle: bool) -> DataLoader:
    numbers: Any = Numbers()
    return DataLoader(numbers, BATCH_SIZE, collate_fn=as_batch, shuffle=shuffle)


def model_and_optimizer(weight: float) -> tuple[nn.Module, SGD]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, weight)
    return model, SGD(model.parameters(), lr=0.1)


def samples_in(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return plain(batch["samples"])
    raise SolutionFailed(
        f"a batch is {plain(batch)}, and not what the loader's own collate_fn makes of the samples: hand `collate_fn`"
        " on to the new loader, and share out the numbers of the samples, by a sampler, before they become a batch"
    )


def trained(batches: Iterable[Any], model: nn.Module, optimizer: SGD) -> list:
    """The weights after each step of a script's training loop."""
    found = []
    for batch in batches:
        F.mse_loss(model(batch["inputs"]), batch["targets"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    return found


def run(path: str) -> dict:
    """On one rank: the samples of each step and the weights after it, and what they are on one device."""
    batches = list(loader(shuffle=False))
    on_one_device = trained(batches, *model_and_optimizer(weight=1.0))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    numbers: Any = loader(shuffle=False)
    own_model, own_optimizer = model_and_optimizer(weight=1.0 + rank)  # nobody has made them equal
    prepared = load_name(path, "prepare")(numbers, own_model, own_optimizer, loader(shuffle=True))
    own_loader, model, optimizer, shuffled = prepared
    own_batches = list(own_loader)
    return {
        "same_optimizer": optimizer is own_optimizer,
        "samples": list(map(samples_in, own_batches)),
        "batches": list(map(samples_in, batches)),
        "read": sorted(set(numbers.dataset.read)),
        "weights": trained(own_batches, model, optimizer),
        "on_one_device": on_one_device,
        "shuffled": list(map(samples_in, shuffled)),
    }


def finding(results: list[dict]) -> str | None:
    """The first thing that is wrong: the optimizer, the samples, the training, the shuffling."""
    if not all(result["same_optimizer"] for result in results):
        return (
            "the optimizer that came back is another one than was given, without its settings and its state. It needs"
            " no change, so return the very object: equal weights and averaged gradients make equal steps on all ranks"
        )
    return wrong_samples(results) or wrong_weights(results) or wrong_shuffle(results)


def wrong_samples(results: list[dict]) -> str | None:
    """A finding about the samples of each step of the loader that does not shuffle."""
    samples = [result["samples"] for result in results]
    batches = results[0]["batches"]
    if joined(samples) != batches:
        title = "in each step the ranks together do not have the samples of one batch, in the loader's order"
        if samples == samples[:1] * len(samples):
            title = "every rank has the same samples: a sampler has to deal them out (DistributedSampler does)"
        elif max(map(len, samples[0]), default=0) == BATCH_SIZE:
            title = f"the loader's batch_size, {BATCH_SIZE}, is that of all ranks: a rank's is batch_size // world size"
        return side_by_side(f"{title}; the samples of each step:", samples, batches_of_the_original_loader=batches)
    read = [result["read"] for result in results]
    if read != [sorted(flat(of_rank)) for of_rank in samples]:
        title = "choose a rank's samples before they are read: these were read, and some of them thrown away:"
        return side_by_side(title, read)
    return None


def wrong_weights(results: list[dict]) -> str | None:
    """A finding about the training with the prepared objects."""
    found = [result["weights"] for result in results]
    expected = results[0]["on_one_device"]
    if near(found, [expected] * len(results)):
        return None
    title = (
        "the weights are not those of one device: DistributedDataParallel, around the very network that was given,"
        " gives all ranks the weights of rank 0, and averages their gradients, so that the ranks do not drift apart"
    )
    return side_by_side(f"{title}; the weight after each step:", found, it_should_be=expected)


def wrong_shuffle(results: list[dict]) -> str | None:
    """A finding about the samples of the loader that shuffles."""
    samples = [result["shuffled"] for result in results]
    of_all = flat(joined(samples))
    if sorted(of_all) != list(range(SAMPLES)):
        title = (
            "with a loader that shuffles some samples are on two ranks and others on none, because each rank has drawn"
            " an order of its own: draw it from a generator that is seeded alike on all ranks (DistributedSampler does)"
        )
    elif of_all == sorted(of_all):
        title = "the loader shuffles, and the prepared one does not: look at whether its sampler is a RandomSampler"
    else:
        return None
    return side_by_side(f"{title}; the samples of each step:", samples)


def joined(samples: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each step on all ranks, in the order of the dataset."""
    steps = zip_longest(*samples, fillvalue=[])
    return [sorted(flat(shares)) for shares in steps]
