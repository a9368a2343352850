"""Steps of a network on one rank, and how long they take: the job of `benchmarks.your_network.measure`."""

import contextlib
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from benchmarks.harness.rows import DDP
from benchmarks.your_network import spec, training
from common.cores import confine_to_device, threads_per_worker
from common.process_group import process_group
from common.small.data_parallel import EmulatedDataParallel

ONE_DEVICE = "one device"
WARM_UP_STEPS = 2  # DDP makes its final buckets in the second step


@dataclass(frozen=True)
class Work:
    """What all ways have in common.

    Attributes:
        spec, shape: as `spec.load` takes them.
        batch: the global one.
        cores_per_device: None where the devices are GPUs.
    """

    spec: str
    shape: tuple[int, ...] | None
    batch: int
    cores_per_device: int | None


def time_steps(work: Work, way: str, devices: int, steps: int) -> float:
    """Seconds of a step, after a warm-up, with this rank's share of the batch.

    Args:
        way: ONE_DEVICE, or DataParallel's or DDP's name in `benchmarks.harness.rows`.
    """
    device = _take_device(work)
    network = spec.load(work.spec, work.shape)
    batch = training.make_batch(network, work.batch // int(os.environ["WORLD_SIZE"]))
    group = contextlib.nullcontext()
    if way == DDP:
        group = process_group("gloo" if device.type == "cpu" else "nccl")
    with group:
        model = _wrapped(training.build(network).to(device), way, devices)
        optimizer = training.make_optimizer(network, training.trainable(model))

        def step() -> None:
            own = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
            training.loss_of(network, model, own).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(WARM_UP_STEPS):
            step()
        began = _now(device)
        for _ in range(steps):
            step()
        return (_now(device) - began) / steps


def _take_device(work: Work) -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    if work.cores_per_device is None:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    confine_to_device(local_rank, work.cores_per_device)
    torch.set_num_threads(threads_per_worker(int(os.environ["WORLD_SIZE"])))
    return torch.device("cpu")


def _wrapped(model: nn.Module, way: str, devices: int) -> nn.Module:
    """The model in this way; DataParallel is torch's or, without GPUs, replicas on threads."""
    if way == DDP:
        return DistributedDataParallel(model)
    if way == ONE_DEVICE:
        return model
    if next(model.parameters()).is_cuda:
        return nn.DataParallel(model, device_ids=list(range(devices)))
    return EmulatedDataParallel(model, devices)


def _now(device: torch.device) -> float:
    """The time at which the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
