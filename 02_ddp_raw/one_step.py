"""One optimizer step of two ranks, in numbers: one weight, four samples, and what each rank has at each moment.

    torchrun --standalone --nproc-per-node 2 02_ddp_raw/one_step.py

The network is w · x with the single weight w = 1. The loss of a sample (x, y) is (w · x - y)² / 2, so its gradient is
(w · x - y) · x. All numbers can be checked by hand.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early, as minimal.py says
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

SAMPLES = torch.tensor([[1.0, -2.0], [1.0, -4.0], [1.0, 0.0], [1.0, -2.0]])  # one (x, y) a row
LEARNING_RATE = 0.1


def say(text: str) -> None:
    """Print a line on every rank, one rank after the other, so that lines do not mix."""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            print(f"[rank {rank}] {text}", flush=True)
        dist.barrier()  # the next rank's turn


def headline(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"\n{text}", flush=True)
    dist.barrier()


def mean_loss(weight: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    x, y = samples.T
    return ((weight * x - y) ** 2 / 2).mean()


def numbers(values: torch.Tensor) -> str:
    return ", ".join(f"{value:g}" for value in values.flatten().tolist())


def equal_shards() -> float:
    """One step on two shards of two samples. Returns the weight after it."""
    headline("One step: four samples, two on each rank.")
    weight = torch.tensor([1.0], requires_grad=True)
    sampler = DistributedSampler(SAMPLES, shuffle=False)
    own = list(sampler)
    shard = SAMPLES[own]
    say(f"has the samples {own}, with x = {numbers(shard[:, 0])} and y = {numbers(shard[:, 1])}")

    loss = mean_loss(weight, shard)
    loss.backward()
    say(f"computes its loss {loss.item():g} and its gradient {weight.grad.item():g}")

    dist.all_reduce(weight.grad)  # in place: on every rank the sum over all ranks
    say(f"has after the all-reduce the sum of the gradients, {weight.grad.item():g}")
    weight.grad /= dist.get_world_size()
    say(f"divides by the number of ranks: the gradient is {weight.grad.item():g}")

    with torch.no_grad():
        weight -= LEARNING_RATE * weight.grad
    say(f"takes the step: w = 1 - {LEARNING_RATE:g} · {weight.grad.item():g} = {weight.item():g}")
    return weight.item()


def one_device() -> float:
    """The same step of a single process that has all samples."""
    weight = torch.tensor([1.0], requires_grad=True)
    mean_loss(weight, SAMPLES).backward()
    return (weight - LEARNING_RATE * weight.grad).item()


def ddp() -> float:
    """The same step with torch's DDP, which calls the all-reduce within backward."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model = DistributedDataParallel(model)
    x, y = SAMPLES[list(DistributedSampler(SAMPLES, shuffle=False))].T
    prediction = model(x[:, None]).squeeze(1)
    ((prediction - y) ** 2 / 2).mean().backward()
    weight = model.module.weight
    return (weight - LEARNING_RATE * weight.grad).item()


def unequal_shards() -> None:
    """Three samples on two ranks: the mean of the ranks' means is not the mean over the samples."""
    headline("Unequal shards: three samples, two on rank 0 and one on rank 1.")
    weight = torch.tensor([1.0], requires_grad=True)
    shard = SAMPLES[dist.get_rank() : 3 : 2]
    mean_loss(weight, shard).backward()
    own = weight.grad.clone()
    say(f"has {len(shard)} of 3 samples, and the gradient {own.item():g}")

    mean_of_means = own.clone()
    dist.all_reduce(mean_of_means)
    mean_of_means /= dist.get_world_size()

    total = torch.tensor([own.item() * len(shard), len(shard)])  # what can be added: a sum and a count
    dist.all_reduce(total)
    gradient_sum, count = total.tolist()
    true_mean = gradient_sum / count
    error = mean_of_means.item() - true_mean
    say(f"would get {mean_of_means.item():g} as mean of means; over the samples it is {true_mean:g}: off by {error:g}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("error: this is about two ranks: torchrun --standalone --nproc-per-node 2 02_ddp_raw/one_step.py")
    dist.init_process_group("gloo")
    weight = equal_shards()
    weight_of_ddp = ddp()
    weight_of_one = one_device()
    say(f"and one device with all four samples gets w = {weight_of_one:g}; torch's DDP gets {weight_of_ddp:g}")
    assert weight == weight_of_one == weight_of_ddp
    unequal_shards()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
