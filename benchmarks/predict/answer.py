"""How fast would a step be on 1 to 512 GPUs, and from which batch on would they pay?"""

import argparse
from dataclasses import asdict, dataclass, replace

from benchmarks.harness.hollow import DependsOnNumbers
from benchmarks.predict import presets
from benchmarks.predict.count import Counted, count
from benchmarks.predict.model import GRADIENT_BYTES, Network, Setup, pays_from, speed_up, step
from benchmarks.predict.page import page
from benchmarks.predict.presets import HARSH, KIND, Gpu, Hardware
from benchmarks.your_network import memory, spec, strategies
from benchmarks.your_network.answers import conclude, milliseconds, write
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.memory import Setting
from benchmarks.your_network.spec import UserNetwork

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs
PAYS = 0.9  # the efficiency from which on GPUs are said to pay
LEGEND = """
Range: what unpublished inputs leave. worth: the speed-up over one GPU that takes the
samples of all, for each GPU. pays from: the smallest batch in all, a power of two, with
which the GPUs are worth 90 %."""


@dataclass(frozen=True)
class Range:
    """The setup that is predicted, and what it would be if all that is not published were kind, or harsh."""

    usual: Setup
    kind: Setup
    harsh: Setup


@dataclass(frozen=True)
class Row:
    """A number of GPUs with the same batch on each as one GPU.

    Attributes:
        seconds, kind, harsh: of a step, and the ends of its range.
        worth: how many times faster they are than one GPU that takes all their samples in one step, as a share of
            their number. One GPU with one GPU's share would be no measure: a launch-bound step takes more samples in
            the same time, so fewer GPUs with more samples each would do as well.
        pays_from: the smallest batch in all, a power of two, with which they are worth PAYS.
    """

    gpus: int
    seconds: float
    kind: float
    harsh: float
    worth: float
    pays_from: int | None


def answer(options: argparse.Namespace) -> None:
    users = spec.load(options.spec, options.input, options.optimizer)
    counted = count(users, options.batch)
    hardware = Hardware(options.gpu, options.inner, options.network, options.gpus_per_node)
    gpu = presets.GPUS[options.gpu].name
    found = predicted(counted, hardware, options.batch)
    if options.measured_ms:
        gpu = f"your GPU, measured: {options.measured_ms:g} ms for {options.batch}"
        found = measured(found.usual, options.measured_ms / 1000)
    rows = [row(found, gpus) for gpus in COUNTS]
    peak = peak_of_one_gpu(users, presets.GPUS[options.gpu], options.batch)
    print_heading(counted, gpu, hardware, options.batch)
    print_table(rows, options.batch)
    if options.page:
        write(options.page, "--page", page(found.usual, hardware, gpu if options.measured_ms else None))
        print(f"\nWritten to {options.page}")
    record = {
        "network": asdict(counted.network),
        "launches_left_out": counted.recurrent,
        "hardware": hardware._asdict(),
        "gpu": gpu,
        "batch": options.batch,
        "peak": peak,
        "predict": [asdict(row) for row in rows],
    }
    conclude(options, facts(found.usual, rows, peak, presets.GPUS[options.gpu]), record)


def predicted(counted: Counted, hardware: Hardware, batch: int) -> Range:
    """The setup on published figures. Launches of recurrent layers are left out."""
    usual = presets.setup(counted.network, hardware, batch)
    if counted.recurrent:
        usual = replace(usual, launch_seconds=0.0)
    kind_compute, harsh_compute = presets.compute_range(counted.network, presets.GPUS[hardware.gpu])
    kind = usual.scaled(**KIND, launch_seconds=presets.KIND_LAUNCH, sample_seconds=kind_compute)
    harsh = usual.scaled(**HARSH, launch_seconds=presets.HARSH_LAUNCH, sample_seconds=harsh_compute)
    return Range(usual, kind, harsh)


def measured(usual: Setup, seconds: float) -> Range:
    """The setup whose step takes so long on one GPU, of which less is to be assumed."""
    # A step is no faster than its launches: where the measured one is, they take less time than is assumed.
    longest_launch = seconds / usual.network.operators
    launch_seconds = min(usual.launch_seconds, longest_launch)
    usual = replace(usual, sample_seconds=seconds / usual.batch, launch_seconds=launch_seconds)
    return Range(usual, usual.scaled(**KIND), usual.scaled(**HARSH))


def row(found: Range, gpus: int) -> Row:
    return Row(
        gpus=gpus,
        seconds=step(found.usual, gpus),
        kind=step(found.kind, gpus),
        harsh=step(found.harsh, gpus),
        worth=speed_up(found.usual, gpus * found.usual.batch, gpus) / gpus,
        pays_from=pays_from(found.usual, gpus, PAYS),
    )


def peak_of_one_gpu(network: UserNetwork, gpu: Gpu, batch: int) -> int | None:
    """The bytes that a step of `batch` samples needs at its peak; None where it can only be told by computing."""
    setting = Setting(strategies.ONE_DEVICE, 1, "bf16" if gpu.is_mixed else "no")
    try:
        return memory.need(network, setting, batch).most
    except (DependsOnNumbers, StepFailed):  # in half precision it may fail, and not where it was counted
        return None


def print_heading(counted: Counted, gpu: str, hardware: Hardware, batch: int) -> None:
    """Print what is predicted, and what is left out."""
    network: Network = counted.network
    gradients = network.parameters * GRADIENT_BYTES / 2**20
    print(f"A PREDICTION, not a measurement, for a batch of {batch} on each GPU:")
    print(f"{network.name} on {gpu};")
    print(f"nodes of {hardware.gpus_per_node}, {hardware.inner} within, {hardware.network} between.")
    print(f"{network.parameters:,} parameters ({gradients:,.1f} MiB of gradients),")
    print(f"{short(network.multiply_adds)} multiply-adds a sample, {network.operators:,} operators a step.")
    if counted.recurrent:
        print("Its recurrent layers are counted step by step in time. cuDNN fuses these operators,")
        print("so the time of launching them is left out: measure a step for --measured-ms.")


def print_table(rows: list[Row], batch: int) -> None:
    """Print the rows in 66 columns."""
    print(f"\n{'GPUs':>5}{'samples/s':>12}{'ms a step':>12}{'(range)':>17}{'worth':>8}{'pays from':>12}")
    for row in rows:
        rate = short(row.gpus * batch / row.seconds)
        times = f"({milliseconds(row.kind)}–{milliseconds(row.harsh)})"
        pays = "–" if row.pays_from is None else f"{row.pays_from:,}"
        print(f"{row.gpus:>5}{rate:>12}{milliseconds(row.seconds):>12}{times:>17}{row.worth:>8.0%}{pays:>12}")
    print(LEGEND)


def short(count: float) -> str:
    """Three digits and the prefix of a unit."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:#.3g}{prefix}".replace(f".{prefix}", prefix)
    return f"{count:.0f}"


def facts(setup: Setup, rows: list[Row], peak: int | None, gpu: Gpu) -> list[str]:
    """How many GPUs pay, what one of them does in a step, and what its memory holds."""
    most = max((row for row in rows if row.worth >= PAYS), key=lambda row: row.gpus)
    worth = most.gpus * most.worth
    kernels = milliseconds(setup.kernels)
    launches = milliseconds(setup.launches)
    lines = [
        f"Worth 90 % of their number: up to {most.gpus} GPUs ({worth:.1f}) with {setup.batch} samples on each.",
        f"A step on one GPU: {kernels} ms of kernels; to start them takes {launches} ms beside it.",
    ]
    if peak:
        verb = "does not fit: it needs" if peak > gpu.gib * 2**30 else "needs"
        lines.append(f"The batch {verb} {peak / 2**30:,.1f} GiB of this GPU's {gpu.gib}.")
    return lines
