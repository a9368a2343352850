"""How long does a step take here, on one device and, under DataParallel and DDP, on several of this machine?

A device is a GPU. On a machine without GPUs it is an equal part of the cores (see `common.cores`), so that one device
has as much to compute with as each of several. All rows have the same global batch, which every step takes from the
host's memory, and take turns (`benchmarks.harness.paired`).
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from benchmarks.harness.paired import Samples, interval_of_median, ratios, take_turns
from benchmarks.harness.rows import DATA_PARALLEL, DDP, ONE_DEVICE
from benchmarks.your_network import spec, training
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.formats import milliseconds
from common.cores import available_cores, confine_to_device, threads_per_worker
from common.errors import fail
from common.process_group import process_group
from common.processes import RankFailed, ranks
from common.small.data_parallel import EmulatedDataParallel

SECONDS = 1.0  # about, for one measurement of a row
MOST_STEPS = 50  # of one measurement
TIMEOUT = 900  # seconds, for one measurement
WARM_UP_STEPS = 2  # DDP makes its final buckets in the second step


@dataclass(frozen=True)
class Benchmark:
    """What all rows have in common.

    Attributes:
        spec, shape: as `spec.load` takes them.
        batch: the global one.
        cores_per_device: None where the devices are GPUs.
    """

    spec: str
    shape: tuple[int, ...] | None
    batch: int
    cores_per_device: int | None


class MeasuredRow(NamedTuple):
    """A strategy on so many devices."""

    strategy: str
    devices: int

    @property
    def name(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}, {self.devices}"

    def sample(self, benchmark: Benchmark, steps: int) -> float:
        """Seconds of a step of the slowest process.

        Raises:
            StepFailed: if a process fails.
        """
        processes = self.devices if self.strategy == DDP else 1
        pool = ranks(processes, on_cpu=benchmark.cores_per_device is not None)
        try:
            return max(pool.run(time_steps, benchmark, self.strategy, self.devices, steps, timeout=TIMEOUT))
        except RankFailed as error:
            rank, failure = next(iter(error.failures.items()))  # the others may have waited for this one
            reason = failure.partition("\n")[0]
            raise StepFailed(f"{self.name} cannot: rank {rank}: {reason}") from error


def answer(options: argparse.Namespace) -> Samples:
    """Print a table; seconds of a step of each row in each round."""
    devices = sorted({1, *options.devices})
    for count in devices:
        if options.batch % count:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {count} devices")
    cores = cores_per_device(devices[-1])
    device = f"{cores} of this machine's {available_cores()} cores"
    if cores is None:
        device = torch.cuda.get_device_name()
    network = spec.load(options.spec, options.input)
    benchmark = Benchmark(options.spec, options.input, options.batch, cores)
    seconds = seconds_of(benchmark, rows_on(devices))
    steps = max(1, min(round(SECONDS / statistics.median(seconds.values())), MOST_STEPS))
    print(f"{network.title}, global batch {options.batch}, {options.rounds} rounds; a device is {device}.", flush=True)
    with tqdm(range(options.rounds), leave=False, disable=None) as rounds:
        samples = take_turns({row.name: partial(row.sample, benchmark, steps) for row in seconds}, rounds)
    print_table(samples, options.batch)
    return samples


def rows_on(devices: Sequence[int]) -> list[MeasuredRow]:
    """One device, and both strategies on several."""
    rows = [MeasuredRow(ONE_DEVICE, 1)]
    for count in devices:
        if count > 1:
            rows += [MeasuredRow(DATA_PARALLEL, count), MeasuredRow(DDP, count)]
    return rows


def seconds_of(benchmark: Benchmark, rows: Sequence[MeasuredRow]) -> dict[MeasuredRow, float]:
    """Roughly the seconds of a step of each row; a row that cannot train this network is left out, and it is said why.

    Raises:
        StepFailed: if one device cannot train it either.
    """
    seconds = {}
    for row in rows:
        try:
            seconds[row] = row.sample(benchmark, steps=1)
        except StepFailed as error:
            if row.strategy == ONE_DEVICE:
                raise
            print(error)
    return seconds


def cores_per_device(devices: int) -> int | None:
    """The cores of each device; None where the devices are GPUs.

    Raises:
        UserError: if the machine has not so many GPUs or cores.
    """
    gpus = torch.cuda.device_count()
    cores = available_cores()
    if 0 < gpus < devices:
        fail(f"this machine has {gpus} GPUs, not {devices}; without them (CUDA_VISIBLE_DEVICES=) devices are cores")
    if gpus:
        return None
    if cores < devices:
        fail(f"{devices} devices need more than this machine's {cores} cores")
    return cores // devices


def print_table(samples: Samples, batch: int) -> None:
    """Print the rows in 61 columns."""
    print(f"\n{'devices':<18}{'ms a step':>11}{'samples/s':>11}{'faster':>8}{'interval':>13}")
    for name, own in samples.items():
        seconds = statistics.median(own)
        speed_ups = ratios(samples[ONE_DEVICE], own)
        faster = f"{statistics.median(speed_ups):.2f}×"
        interval = interval_of_median(speed_ups)
        ends = f"{interval.low:.2f}–{interval.high:.2f}"
        print(f"{name:<18}{milliseconds(seconds):>11}{batch / seconds:>11,.1f}{faster:>8}{ends:>13}")
    print(f"\nfaster: than {ONE_DEVICE}, round by round; interval: of the median.")


def time_steps(benchmark: Benchmark, strategy: str, devices: int, steps: int) -> float:
    """Seconds of a step on this rank, after a warm-up, with its share of the batch.

    Args:
        strategy: ONE_DEVICE, DATA_PARALLEL or DDP of `benchmarks.harness.rows`.
    """
    device = _take_device(benchmark)
    network = spec.load(benchmark.spec, benchmark.shape)
    batch = training.make_batch(network, benchmark.batch // int(os.environ["WORLD_SIZE"]))
    group = contextlib.nullcontext()
    if strategy == DDP:
        group = process_group("gloo" if device.type == "cpu" else "nccl")
    with group:
        model = _wrapped(training.build(network).to(device), strategy, devices)
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


def _take_device(benchmark: Benchmark) -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    if benchmark.cores_per_device is None:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    confine_to_device(local_rank, benchmark.cores_per_device)
    torch.set_num_threads(threads_per_worker(int(os.environ["WORLD_SIZE"])))
    return torch.device("cpu")


def _wrapped(model: nn.Module, strategy: str, devices: int) -> nn.Module:
    """The model as the strategy trains it; DataParallel is torch's or, without GPUs, replicas on threads."""
    if strategy == DDP:
        return DistributedDataParallel(model)
    if strategy == ONE_DEVICE:
        return model
    if next(model.parameters()).is_cuda:
        return nn.DataParallel(model, device_ids=list(range(devices)))
    return EmulatedDataParallel(model, devices)


def _now(device: torch.device) -> float:
    """The time at which the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
