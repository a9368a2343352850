"""The time of a step on this machine: on one device and, under DataParallel and DDP, on several.

A device is a GPU. On a machine without GPUs it is an equal part of the cores (see `common.cores`), so that one device
has as much to compute with as each of several. All rows have the same global batch, which every step takes from the
host's memory, and take turns (`benchmarks.harness.paired`).
"""

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from benchmarks.harness.formats import milliseconds
from benchmarks.harness.options import TIMEOUT_SECONDS, WARM_UP_STEPS
from benchmarks.harness.paired import FEWEST_ROUNDS, Samples, interval_of_median, ratios, take_turns
from benchmarks.harness.rows import DATA_PARALLEL, DDP, ONE_DEVICE
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import load
from benchmarks.your_network.strategies import Setting, add_global_batch, settings_for
from common.cores import available_cores, confine_to_device, threads_per_worker
from common.errors import fail
from common.flag_types import positive
from common.instruments.clock import now
from common.instruments.result import quantity
from common.launch import read_launch
from common.process_group import process_group
from common.processes import RankFailed, ranks
from common.small.data_parallel import EmulatedDataParallel

# A turn of a row takes about so many seconds, but no more than so many steps.
SECONDS_OF_A_TURN = 1.0
MOST_STEPS_OF_A_TURN = 50


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    add_global_batch(parser)
    flag("--devices", type=positive, nargs="+", metavar="N", help="how many (1 2; 1 on one GPU)")
    flag("--rounds", type=positive, default=FEWEST_ROUNDS, metavar="R", help="turns that each takes (%(default)s)")


class Work(NamedTuple):
    """The training that every row times. Each process loads the network anew, because its functions cannot be sent.

    Attributes:
        spec, shape: as `load` takes them.
        batch: the global one.
        cores_per_device: None where the devices are GPUs.
    """

    spec: str
    shape: tuple[int, ...] | None
    batch: int
    cores_per_device: int | None


def answer(options: argparse.Namespace) -> Samples:
    """Print a table, and return the seconds of a step of each row in each round."""
    has_one_gpu = torch.cuda.device_count() == 1
    devices = options.devices or ([1] if has_one_gpu else [1, 2])
    settings = settings_for(options.batch, devices, (DATA_PARALLEL, DDP))
    cores = cores_per_device(max(devices))
    work = Work(options.spec, options.input, options.batch, cores)
    title = load(work.spec, work.shape).title
    # One step of each says which can train the network, and how many steps make a turn.
    seconds = try_settings(settings, work)
    steps = round(SECONDS_OF_A_TURN / statistics.median(seconds.values()))
    steps = min(max(steps, 1), MOST_STEPS_OF_A_TURN)
    seconds_of_round = sum(seconds.values()) * (WARM_UP_STEPS + steps)
    length = f"{quantity(options.rounds, 'round')} of some {seconds_of_round:.0f} s"
    device = f"{cores} of this machine's {available_cores()} cores" if cores else torch.cuda.get_device_name()
    print(f"{title}, global batch {options.batch}, {length}; a device is {device}.", flush=True)
    contestants = {setting.name: partial(seconds_of_step, setting, work, steps) for setting in seconds}
    with tqdm(range(options.rounds), leave=False, disable=None) as rounds:
        samples = take_turns(contestants, rounds)
    print_table(samples, options.batch)
    return samples


def cores_per_device(devices: int) -> int | None:
    """The cores of each of so many devices; None where these are GPUs. Raises UserError if there are too few."""
    gpus = torch.cuda.device_count()
    cores = available_cores()
    if gpus >= devices:
        return None
    if gpus > 0:
        found = quantity(gpus, "GPU")
        fail(f"this machine has {found}, not {devices}; without them (CUDA_VISIBLE_DEVICES=) devices are cores")
    if cores < devices:
        fail(f"{devices} devices need more than this machine's {quantity(cores, 'core')}")
    return cores // devices


def try_settings(settings: Sequence[Setting], work: Work) -> dict[Setting, float]:
    """The seconds of one step of each setting that can train this network. The failures of the others are printed.

    Raises StepFailed if one device cannot train it either.
    """
    seconds = {}
    for setting in settings:
        try:
            seconds[setting] = seconds_of_step(setting, work, steps=1)
        except StepFailed as failure:
            if setting.strategy == ONE_DEVICE:
                raise
            print(failure)
    return seconds


def seconds_of_step(setting: Setting, work: Work, steps: int) -> float:
    """Seconds of a step of the slowest process. Raises StepFailed if a process fails."""
    processes = setting.devices if setting.strategy == DDP else 1
    pool = ranks(processes, on_cpu=work.cores_per_device is not None)
    try:
        return max(pool.run(time_steps, setting, work, steps, timeout=TIMEOUT_SECONDS))
    except RankFailed as error:
        rank, failure = next(iter(error.failures.items()))  # the others may have waited for this one
        reason = failure.partition("\n")[0]
        raise StepFailed(f"{setting.name} cannot train: rank {rank}: {reason}") from error


def time_steps(setting: Setting, work: Work, steps: int) -> float:
    """Seconds of a step on this rank, after a warm-up, with its share of the batch."""
    device = take_device(work.cores_per_device)
    network = load(work.spec, work.shape)
    batch = network.make_batch(work.batch // read_launch().world_size)
    group = contextlib.nullcontext()
    if setting.strategy == DDP:
        group = process_group("gloo" if device.type == "cpu" else "nccl")
    with group:
        model = wrap_on_this_machine(network.make_model().to(device), setting)
        optimizer = network.make_optimizer(model)

        def take_steps(count: int) -> None:
            for _ in range(count):
                device_batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
                network.take_step(model, optimizer, device_batch)

        take_steps(WARM_UP_STEPS)
        began = now(device)
        take_steps(steps)
        return (now(device) - began) / steps


def take_device(cores_per_device: int | None) -> torch.device:
    """The GPU of this rank, or the CPU, of which the rank from now on uses its own part only."""
    launch = read_launch()
    if cores_per_device is None:
        torch.cuda.set_device(launch.local_rank)
        return torch.device("cuda", launch.local_rank)
    confine_to_device(launch.local_rank, cores_per_device)
    torch.set_num_threads(threads_per_worker(launch.world_size))
    return torch.device("cpu")


def wrap_on_this_machine(model: nn.Module, setting: Setting) -> nn.Module:
    """The model as it is trained; DataParallel is torch's or, without GPUs, replicas on threads."""
    if setting.strategy == DDP:
        return DistributedDataParallel(model)
    if setting.strategy == ONE_DEVICE:
        return model
    if next(model.parameters()).is_cuda:
        return nn.DataParallel(model, device_ids=list(range(setting.devices)))
    return EmulatedDataParallel(model, setting.devices)


def print_table(samples: Samples, batch: int) -> None:
    print(f"\n{'devices':<18}{'ms a step':>11}{'samples/s':>11}{'faster':>8}{'interval':>13}")
    for name, values in samples.items():
        seconds = statistics.median(values)
        speed_ups = ratios(samples[ONE_DEVICE], values)
        faster = f"{statistics.median(speed_ups):.2f}×"
        interval = interval_of_median(speed_ups)
        ends = f"{interval.low:.2f}–{interval.high:.2f}"
        print(f"{name:<18}{milliseconds(seconds):>11}{batch / seconds:>11,.1f}{faster:>8}{ends:>13}")
    print(f"\nfaster: than {ONE_DEVICE}, round by round; interval: of the median ({interval.confidence:.0%}).")
