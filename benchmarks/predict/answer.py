"""Question 2: how fast would a step be on 1 to 512 GPUs, and from which batch on would they pay?

The network is counted (see `count`), and the model takes it from there. Two things are left out of the times, and said.
A network with recurrent layers has no time of launches. And the optimizer's update has no time of its own: it is a part
of the published step of ResNet-50 from which a time is scaled, and some 0.1 % of it, but of a network that is mostly
tables it may be the largest part.
"""

import argparse
import dataclasses
from dataclasses import dataclass, replace

from benchmarks.harness.hollow import DependsOnNumbers
from benchmarks.predict import presets
from benchmarks.predict.assumptions import LAUNCH, USUAL, Assumption, Setup, all_harsh, all_kind, of_compute
from benchmarks.predict.count import Counted, count
from benchmarks.predict.presets import Gpu, Hardware
from benchmarks.predict.step import GRADIENT_BYTES, Network, pays_from, speed_up
from benchmarks.your_network import memory, strategies
from benchmarks.your_network.answers import conclude, load, milliseconds, write
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.memory import Setting
from benchmarks.your_network.spec import UserNetwork

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs
PAYS = 0.9  # the efficiency from which on GPUs are said to pay
LEGEND = """
worth: the speed-up over one GPU that takes the samples of all, for each GPU.
faster: the speed-up over one GPU with as many samples in all. pays from: the smallest
batch in all, a power of two, with which the GPUs are worth 90 %.
Range: what unpublished inputs leave. *: launch-bound. Starting the operators takes
longer than running them, so fewer samples take no less time."""


@dataclass(frozen=True)
class Row:
    """A number of GPUs, with the same batch on each as one GPU, and with the same batch in all.

    Attributes:
        seconds, kind, harsh: of a step with the batch on each GPU; with all assumptions at their kind and harsh ends.
        worth: how many times faster they are than one GPU that takes all their samples in one step, as a share of
            their number. One GPU with one GPU's share would be no measure: a launch-bound step takes more samples in
            the same time, so fewer GPUs with more samples each would do as well.
        is_launch_bound: whether the step starts kernels for longer than they run.
        faster: how many times faster they take one GPU's batch than it does; None where it is not for so many.
        shared_is_launch_bound: the same of that step.
        pays_from: the smallest batch in all, a power of two, with which they are worth PAYS.
    """

    gpus: int
    seconds: float
    kind: float
    harsh: float
    worth: float
    is_launch_bound: bool
    faster: float | None
    shared_is_launch_bound: bool
    pays_from: int | None


@dataclass(frozen=True)
class Holding:
    """What one GPU has in its memory for a step, and moves there for the update.

    Attributes:
        peak: bytes that a step needs at its peak.
        update_bytes: bytes that an optimizer of one kernel reads and writes once per step, however large the batch: it
            reads parameters, gradients and state, and writes parameters and state. AdamW's are 7 numbers a parameter.
        update_seconds: for these at the memory's peak bandwidth. No optimizer is faster.
    """

    peak: int
    update_bytes: int
    update_seconds: float


def answer(options: argparse.Namespace) -> None:
    users = load(options)
    counted = count(users, options.batch)
    network = counted.network
    hardware = Hardware(options.gpu, options.inner, options.network, options.gpus_per_node)
    gpu = presets.GPUS[options.gpu]
    if options.measured_ms:
        gpu = measured(network, options.batch, options.measured_ms)
    setup, assumptions = prediction(counted, gpu, hardware, options.batch, bool(options.measured_ms))
    found = rows(setup, assumptions)
    held = holding(users, network, hardware, options.batch)
    print_heading(counted, gpu, hardware, options.batch)
    print_table(found, options.batch)
    if options.page:
        from benchmarks.predict.page import page

        own_gpu = gpu if options.measured_ms else None
        text = page(hardware, network, own_gpu, options.batch, setup.training.launch_seconds)
        write(options.page, "--page", text)
        print(f"\nWritten to {options.page}")
    record = {
        "network": {**dataclasses.asdict(network), "parameters": network.parameters},
        "counted_in_batch": counted.samples,
        "launches_left_out": counted.recurrent,
        "hardware": hardware._asdict(),
        "gpu": gpu.name,
        "batch": options.batch,
        "holding": held and dataclasses.asdict(held),
        "predict": [dataclasses.asdict(row) for row in found],
    }
    conclude(options, facts(setup, found, held, hardware), record)


def measured(network: Network, batch: int, milliseconds: float) -> Gpu:
    """A GPU on which the step takes the time that was measured."""
    samples_per_second = batch / (milliseconds / 1000)
    of_resnet50 = samples_per_second * max(presets.estimates(network))
    return Gpu(f"your GPU, measured: {milliseconds:g} ms for {batch}", of_resnet50)


def prediction(
    counted: Counted, gpu: Gpu, hardware: Hardware, batch: int, is_measured: bool = False
) -> tuple[Setup, tuple[Assumption, ...]]:
    """The setup that is predicted, and what is assumed of it. A step that was measured leaves less to assume."""
    workload = presets.training(counted.network, gpu)
    cluster = presets.cluster(hardware.inner, hardware.network, hardware.gpus_per_node)
    assumptions = (*USUAL, LAUNCH, of_compute(counted.network, gpu))
    if counted.recurrent:
        workload = replace(workload, launch_seconds=0.0)
    if is_measured:
        # A step is no faster than its launches: where the measured one is, they take less time than is assumed.
        longest_launch = workload.kernels(batch) / counted.network.operators
        workload = replace(workload, launch_seconds=min(workload.launch_seconds, longest_launch))
        assumptions = USUAL
    return Setup(workload, cluster, batch), assumptions


def rows(setup: Setup, assumptions: tuple[Assumption, ...]) -> list[Row]:
    kind = all_kind(setup, assumptions)
    harsh = all_harsh(setup, assumptions)
    training = setup.training
    found = []
    for gpus in COUNTS:
        faster = None
        if gpus <= setup.batch:
            faster = speed_up(training, setup.batch, gpus, setup.cluster)
        row = Row(
            gpus=gpus,
            seconds=setup.step(gpus),
            kind=kind.step(gpus),
            harsh=harsh.step(gpus),
            worth=speed_up(training, gpus * setup.batch, gpus, setup.cluster) / gpus,
            is_launch_bound=training.launches >= training.kernels(setup.batch),
            faster=faster,
            shared_is_launch_bound=training.launches >= training.kernels(setup.batch / gpus),
            pays_from=pays_from(training, gpus, setup.cluster, PAYS),
        )
        found.append(row)
    return found


def holding(network: UserNetwork, counts: Network, hardware: Hardware, batch: int) -> Holding | None:
    """Of a step of `batch` samples; None where it can only be told by computing."""
    setting = Setting(strategies.ONE_DEVICE, 1, "bf16" if hardware.is_mixed else "no")
    try:
        need = memory.need(network, setting, batch)
    except (DependsOnNumbers, StepFailed):  # it may fail here, and not with the few samples that were counted
        return None
    (split,) = need.devices
    update_bytes = 3 * counts.parameters * GRADIENT_BYTES + 2 * split["optimizer state"]
    return Holding(need.most, update_bytes, update_bytes / (hardware.memory.bandwidth * presets.GIGABYTE))


def print_heading(counted: Counted, gpu: Gpu, hardware: Hardware, batch: int) -> None:
    """Print what is predicted, and what is left out."""
    network = counted.network
    gradients = network.parameters * GRADIENT_BYTES / 2**20
    print(f"A PREDICTION, not a measurement, for a batch of {batch} on each GPU:")
    print(f"{network.name} on {gpu.name};")
    print(f"nodes of {hardware.gpus_per_node}, {hardware.inner} within, {hardware.network} between.")
    print(f"{network.parameters:,} parameters ({gradients:,.1f} MiB of gradients),")
    print(f"{short(network.multiply_adds)} multiply-adds a sample, {network.operators:,} operators a step.")
    if counted.grows:
        print(f"What a sample multiplies depends on the batch: it is counted in one of {batch}.")
    if counted.recurrent:
        print("Its recurrent layers are counted step by step in time. cuDNN fuses these operators,")
        print("so the time of launching them is left out: measure a step for --measured-ms.")


def print_table(found: list[Row], batch: int) -> None:
    """Print the rows in 82 columns."""
    print(f"\n{'':5}{f'{batch} samples on each GPU (range)':^54}{f'{batch} in all':>11}")
    print(f"{'GPUs':>5}{'samples/s':>25}{'ms a step':>21}{'worth':>8}{'faster':>11}{'pays from':>12}")
    for row in found:
        samples = row.gpus * batch
        rates = f"({short(samples / row.harsh)}–{short(samples / row.kind)})"
        mark = "*" if row.is_launch_bound else ""
        times = f"({milliseconds(row.kind)}–{milliseconds(row.harsh)})"
        line = (
            f"{row.gpus:>5}{short(samples / row.seconds):>9}{rates:>16}{mark + milliseconds(row.seconds):>8}{times:>13}"
        )
        faster = ""
        if row.faster is not None:
            faster = f"{'*' if row.shared_is_launch_bound else ''}{row.faster:.1f}×"
        pays = "–" if row.pays_from is None else f"{row.pays_from:,}"
        print(f"{line}{row.worth:>8.0%}{faster:>11}{pays:>12}")
    print(LEGEND)


def short(count: float) -> str:
    """Three digits and the prefix of a unit."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:#.3g}{prefix}".replace(f".{prefix}", prefix)
    return f"{count:.0f}"


def facts(setup: Setup, found: list[Row], held: Holding | None, hardware: Hardware) -> list[str]:
    """How many GPUs pay, what one of them does in a step, and what its memory holds."""
    most = max((row for row in found if row.worth >= PAYS), key=lambda row: row.gpus)
    worth = most.gpus * most.worth
    kernels = milliseconds(setup.training.kernels(setup.batch))
    launches = milliseconds(setup.training.launches)
    lines = [
        f"Worth 90 % of their number: up to {most.gpus} GPUs ({worth:.1f}) with {setup.batch} samples on each.",
        f"A step on one GPU: {kernels} ms of kernels; to start them takes {launches} ms beside it.",
    ]
    if held:
        fits = f"{held.peak / 2**30:,.1f} GiB of this GPU's {hardware.memory.gib}"
        update = f"The optimizer's update, not in the times, takes at least {milliseconds(held.update_seconds)} ms"
        verb = "does not fit: it needs" if held.peak > hardware.memory.gib * 2**30 else "needs"
        lines.append(f"The batch {verb} {fits}. {update}.")
    return lines
