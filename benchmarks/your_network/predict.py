"""The predicted time of a step under DDP on 1 to 512 GPUs, and the batch from which on they pay."""

import argparse
from dataclasses import dataclass, replace

from benchmarks.harness.formats import milliseconds, short
from benchmarks.your_network import presets, scaling
from benchmarks.your_network.all_reduce import Cluster
from benchmarks.your_network.count import NetworkCosts, count
from benchmarks.your_network.scaling import Setup
from benchmarks.your_network.spec import load
from common.flag_types import positive, positive_float

GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LEGEND = f"""
efficiency: throughput / (N × that of one GPU with the same global batch).
pays from: the smallest global batch, a power of two, with an efficiency of more
than {scaling.PAYING_EFFICIENCY:.0%}. –: more than {scaling.LARGEST_GLOBAL_BATCH:,} samples, if there is one."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--batch-per-gpu", type=positive, default=64, metavar="N", help="samples of a step on each GPU (64)")
    flag("--gpu", choices=presets.GPUS, default="a100", help="kind of GPU (a100)")
    flag("--inner", choices=presets.INNER, default="nvlink", help="links between a node's GPUs (nvlink)")
    flag("--network", choices=presets.NETWORK, default="8x200g", help="network cards of a node (8x200g)")
    flag("--gpus-per-node", type=int, choices=(1, 2, 4, 8), default=8, metavar="N", help="1, 2, 4 or 8 (8)")
    measured_step = "milliseconds of a step of --batch-per-gpu samples on one GPU, if you measured it"
    flag("--measured-ms", type=positive_float, metavar="T", help=measured_step)


@dataclass(frozen=True)
class PredictedRow:
    """The seconds of a step on so many GPUs; LEGEND explains the rest. `pays_from` is None where no batch is enough."""

    gpus: int
    seconds: float
    scaling_efficiency: float
    pays_from: int | None


def answer(options: argparse.Namespace) -> list[PredictedRow]:
    batch = options.batch_per_gpu
    costs = count(load(options.spec, options.input), batch)
    setup = make_setup(costs, options.gpu, options.inner, options.gpus_per_node, options.network)
    if options.measured_ms:
        measured = options.measured_ms / 1000
        # The launches are assumed, and may be assumed to take longer than the measured step. They do not.
        launches = min(setup.launch_seconds, measured)
        setup = replace(setup, sample_seconds=measured / batch, launch_seconds=launches)
    rows = []
    for gpus in GPU_COUNTS:
        seconds = scaling.predicted_seconds(setup, batch, gpus)
        efficiency = scaling.scaling_efficiency(setup, gpus * batch, gpus)
        rows.append(PredictedRow(gpus, seconds, efficiency, scaling.pays_from(setup, gpus)))
    print_heading(options, costs, setup)
    print_table(rows, batch)
    return rows


def make_setup(costs: NetworkCosts, gpu: str, inner: str, gpus_per_node: int, network: str) -> Setup:
    """A network under DDP on hardware that `presets` names so: in GPUS, INNER and NETWORK."""
    inner_links = presets.PCIE | {"nvlink": presets.GPUS[gpu].nvlink}
    return Setup(
        buckets=scaling.fill_buckets(costs.gradients),
        sample_seconds=times_resnet50(costs) / presets.GPUS[gpu].resnet50_per_second,
        launch_seconds=costs.operators * presets.LAUNCH_SECONDS,
        cluster=Cluster(gpus_per_node, inner_links[inner], presets.NETWORK[network]),
    )


def times_resnet50(costs: NetworkCosts) -> float:
    """The time that a network's kernels take, as a multiple of ResNet-50's on the same GPU.

    It is the ratio of multiply-adds or that of bytes, whichever is larger. On a P100, published times are 17 % longer
    than this (Inception V3), 4 % shorter (ResNet-101) and 56 % shorter (VGG-16, which moves few bytes).
    """
    by_operations = costs.multiply_adds / presets.RESNET50_MULTIPLY_ADDS
    by_bytes = costs.bytes_of_a_sample / presets.RESNET50_BYTES_OF_A_SAMPLE
    return max(by_operations, by_bytes)


def print_heading(options: argparse.Namespace, costs: NetworkCosts, setup: Setup) -> None:
    """Print what is predicted, and what a step on one GPU consists of."""
    batch = options.batch_per_gpu
    gpu = presets.GPUS[options.gpu].name
    if options.measured_ms:
        gpu = f"of your GPUs, measured: {options.measured_ms:g} ms"
    gradients = costs.parameters * scaling.GRADIENT_BYTES / 2**20
    kernels = milliseconds(batch * setup.sample_seconds)
    launches = milliseconds(setup.launch_seconds)
    print("A PREDICTION: losses may be half or twice as large (benchmarks/PREDICTION.md).")
    print(f"{costs.name}, {batch} samples on each {gpu};")
    print(f"nodes of {options.gpus_per_node}, {options.inner} within, {options.network} between.")
    print(f"{costs.parameters:,} parameters ({gradients:,.1f} MiB of gradients),")
    print(f"{short(costs.multiply_adds)} multiply-adds a sample, {costs.operators:,} operators a step.")
    print(f"A step on one GPU: {kernels} ms of kernels; to start them takes {launches} ms beside it.")


def print_table(rows: list[PredictedRow], batch: int) -> None:
    print(f"\n{'GPUs':>5}{'samples/s':>12}{'ms a step':>12}{'efficiency':>12}{'pays from':>12}")
    for row in rows:
        rate = short(row.gpus * batch / row.seconds)
        pays = "–" if row.pays_from is None else f"{row.pays_from:,}"
        print(f"{row.gpus:>5}{rate:>12}{milliseconds(row.seconds):>12}{row.scaling_efficiency:>12.0%}{pays:>12}")
    print(LEGEND)
