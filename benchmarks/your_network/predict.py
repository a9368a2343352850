"""How fast would a step be on 1 to 512 GPUs, and from which batch on would they pay?"""

import argparse
from dataclasses import asdict, dataclass, replace

from benchmarks.predict import presets
from benchmarks.predict.model import GRADIENT_BYTES, Setup, pays_from, speed_up, step
from benchmarks.predict.page import page
from benchmarks.predict.presets import Hardware
from benchmarks.your_network import spec
from benchmarks.your_network.answers import milliseconds, write, write_json
from benchmarks.your_network.count import count

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs
PAYS = 0.9  # the efficiency from which on GPUs are said to pay
LEGEND = """
worth: the speed-up over one GPU that takes the samples of all, for each GPU. pays from:
the smallest batch in all, a power of two, with which the GPUs are worth 90 %."""


@dataclass(frozen=True)
class Row:
    """A number of GPUs with the same batch on each as one GPU.

    Attributes:
        seconds: of a step.
        worth: how many times faster they are than one GPU that takes all their samples in one step, as a share of
            their number. One GPU with one GPU's share would be no measure: a launch-bound step takes more samples in
            the same time, so fewer GPUs with more samples each would do as well.
        pays_from: the smallest batch in all, a power of two, with which they are worth PAYS.
    """

    gpus: int
    seconds: float
    worth: float
    pays_from: int | None


def answer(options: argparse.Namespace) -> None:
    network = count(spec.load(options.spec, options.input, options.optimizer), options.batch)
    hardware = Hardware(options.gpu, options.inner, options.network, options.gpus_per_node)
    setup = presets.setup(network, hardware, options.batch)
    gpu = presets.GPUS[options.gpu].name
    if options.measured_ms:
        setup = measured(setup, options.measured_ms / 1000)
        gpu = f"your GPU, measured: {options.measured_ms:g} ms for {options.batch}"
    rows = [row(setup, gpus) for gpus in COUNTS]
    print_heading(setup, gpu, hardware)
    print_table(rows, options.batch)
    if options.page:
        write(options.page, "--page", page(setup, hardware, gpu if options.measured_ms else None))
        print(f"\nWritten to {options.page}")
    about = {"network": asdict(network), "hardware": hardware._asdict(), "gpu": gpu}
    write_json(options, {**about, "predict": [asdict(row) for row in rows]})


def measured(setup: Setup, seconds: float) -> Setup:
    """The setup whose step takes so long on one GPU."""
    # A step is no faster than its launches: where the measured one is, they take less time than is assumed.
    longest_launch = seconds / setup.network.operators
    launch_seconds = min(setup.launch_seconds, longest_launch)
    return replace(setup, sample_seconds=seconds / setup.batch, launch_seconds=launch_seconds)


def row(setup: Setup, gpus: int) -> Row:
    return Row(
        gpus=gpus,
        seconds=step(setup, gpus),
        worth=speed_up(setup, gpus * setup.batch, gpus) / gpus,
        pays_from=pays_from(setup, gpus, PAYS),
    )


def print_heading(setup: Setup, gpu: str, hardware: Hardware) -> None:
    """Print what is predicted, and what a step on one GPU consists of."""
    network = setup.network
    gradients = network.parameters * GRADIENT_BYTES / 2**20
    kernels = milliseconds(setup.kernels)
    launches = milliseconds(setup.launches)
    print(f"A PREDICTION, not a measurement, for a batch of {setup.batch} on each GPU:")
    print(f"{network.name} on {gpu};")
    print(f"nodes of {hardware.gpus_per_node}, {hardware.inner} within, {hardware.network} between.")
    print(f"{network.parameters:,} parameters ({gradients:,.1f} MiB of gradients),")
    print(f"{short(network.multiply_adds)} multiply-adds a sample, {network.operators:,} operators a step.")
    print(f"A step on one GPU: {kernels} ms of kernels; to start them takes {launches} ms beside it.")


def print_table(rows: list[Row], batch: int) -> None:
    """Print the rows in 49 columns."""
    print(f"\n{'GPUs':>5}{'samples/s':>12}{'ms a step':>12}{'worth':>8}{'pays from':>12}")
    for row in rows:
        rate = short(row.gpus * batch / row.seconds)
        pays = "–" if row.pays_from is None else f"{row.pays_from:,}"
        print(f"{row.gpus:>5}{rate:>12}{milliseconds(row.seconds):>12}{row.worth:>8.0%}{pays:>12}")
    print(LEGEND)


def short(count: float) -> str:
    """Three digits and the prefix of a unit."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:#.3g}{prefix}".replace(f".{prefix}", prefix)
    return f"{count:.0f}"
