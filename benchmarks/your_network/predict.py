"""Question 2: how fast would a step be on 1 to 512 GPUs, and how many would pay?

The model is `benchmarks.predict`'s, and so are links and GPUs. Here the network is counted: its multiply-adds,
attention's too, its gradients' bytes and its operators. Nothing is computed (see `hollow`).

An RNN, GRU or LSTM of torch is counted step by step in time: each time step has operators of its own. On a GPU it is
one operator of torch, for which cuDNN fuses the operations of a time step and batches those of several (Appleyard et
al., "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). How many kernels that makes is not published,
so the time of launches is left out of such a network's prediction, and the answer says so.

The optimizer's update is a part of the published step of ResNet-50 from which a time is scaled, and some 0.1 % of it.
Of a network that is mostly tables it may be the largest part. The model leaves it out for all networks, here as in
`benchmarks.predict`; the answer says what it takes at least, and so by how much all times are too short.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from torch import Tensor, nn

from benchmarks.harness.hollow import DependsOnNumbers, hollow_if_possible
from benchmarks.predict import presets
from benchmarks.predict.assumptions import LAUNCH, USUAL, Assumption, Setup, all_harsh, all_kind, of_compute
from benchmarks.predict.count import EXAMPLES, count_layers, count_network, operators_without_formula
from benchmarks.predict.page import Start, page
from benchmarks.predict.presets import Gpu, Hardware
from benchmarks.predict.step import GRADIENT_BYTES, Network, speed_up
from benchmarks.predict.table import milliseconds
from benchmarks.your_network import answers, memory, strategies, training
from benchmarks.your_network.memory import Setting
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.training import StepFailed
from common.errors import fail
from common.files import write_atomically

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs
PAYS = 0.9  # the efficiency from which on GPUs are said to pay
LARGEST_BATCH = 2**20  # of one GPU, for which it is asked whether it pays
WORTH_SAYING = 0.01  # of a step: the time of an update from which on it is said
FASTEST_NETWORK = "8x400g"
SLOWEST_NETWORK = "25g"


def answer(options: argparse.Namespace) -> None:
    users = answers.network(options)
    network = counted(users)
    grows = not is_proportional(users, network)
    if grows:
        network = counted(users, options.batch)
    recurrent = has_recurrent_layers(users)
    not_counted = without_formula(users)
    hardware = Hardware(options.gpu, options.inner, options.network, options.gpus_per_node)
    gpu = presets.GPUS[options.gpu]
    if options.measured_ms:
        gpu = measured(network, options.batch, options.measured_ms)
    setup, assumptions = prediction(network, gpu, hardware, options.batch, bool(options.measured_ms), recurrent)
    found = rows(setup, assumptions)
    held = None if options.measured_ms else holding(users, network, hardware, options.batch)
    print(heading(network, gpu, hardware, options.batch))
    answers.print_assumption(users)
    if grows:
        print(f"What a sample multiplies depends on the batch: it is counted in one of {options.batch}.")
        print("For other batches, as in the columns on the right, it is not counted anew.")
    if recurrent:
        print("Its recurrent layers are counted step by step in time. cuDNN fuses these operators,")
        print("so the time of launching them is left out: measure a step for --measured-ms.")
    if not_counted:
        print(fill(f"Not counted: what {', '.join(not_counted)} multiplies. So all times are too short.", 80))
    print()
    print(table(found, options.batch))
    update_seconds = added_by_update(setup, held) if held else 0.0
    if held and update_seconds:
        moved = f"{held.update_bytes / 2**20:,.0f} MiB"
        print(f"Not in the times: the optimizer's update moves {moved}, so each step takes")
        print(f"at least {milliseconds(update_seconds)} ms more than is said here.")
    if options.page:
        own_gpu = gpu if options.measured_ms else None
        launch = setup.training.launch_seconds
        start = Start(hardware, network, own_gpu, options.batch, divided_batch=options.batch, launch_seconds=launch)
        _write_page(options.page, start)
    record = {
        "network": {
            "parameters": network.parameters,
            "multiply_adds": network.multiply_adds,
            "operators": network.operators,
            "counted_in_batch": options.batch if grows else EXAMPLES,
            "launches_left_out": recurrent,
            "operators_not_counted": not_counted,
            "bytes_of_a_sample": network.bytes_of_a_sample,
        },
        "hardware": hardware._asdict(),
        "gpu": gpu.name,
        "batch": options.batch,
        "peak_bytes": held and held.peak,
        "update_bytes": held and held.update_bytes,
        "update_seconds": held and held.update_seconds,
        "predict": found,
    }
    lines = verdict(setup, found, bool(options.measured_ms), update_seconds)
    if held and held.peak > hardware.memory.gib * 2**30:
        lines[0] = (
            f"Take a smaller batch: {options.batch} samples need {held.peak / 2**30:,.1f} GiB, and this GPU has "
            f"{hardware.memory.gib}. The question memory has the largest that fits."
        )
    answers.conclude(options, lines, record)


def counted(network: UserNetwork, batch: int = EXAMPLES) -> Network:
    """The network as `benchmarks.predict` takes it.

    Args:
        batch: by what its samples multiply in a batch of so many. More than EXAMPLES where it is not proportional.

    Raises:
        StepFailed: if the network, its batch or its loss does not work.
    """
    return hollow_if_possible(partial(_counted, network, max(batch, EXAMPLES)))


def _counted(network: UserNetwork, samples: int) -> Network:
    model = training.build(network)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = training.make_optimizer(network, trained)

    def loss(batch: Any) -> Tensor:
        return training.loss_of(network, model, batch)

    with training.explained(f"a step of {network.title} failed"):
        counts = count_network(network.title, model, optimizer, partial(training.make_batch, network), loss, samples)
    if not counts.multiply_adds:
        fail(f"{network.title} multiplies nothing that is counted, so no time can be predicted from its operations")
    return counts


def without_formula(network: UserNetwork) -> list[str]:
    """The names of the operators that multiply, and whose multiply-adds are not in the count."""

    def found() -> list[str]:
        model = training.build(network)
        batch = training.make_batch(network, EXAMPLES)
        return operators_without_formula(partial(training.loss_of, network, model, batch))

    return hollow_if_possible(found)


def is_proportional(network: UserNetwork, counts: Network) -> bool:
    """True where twice as many samples as were counted multiply twice as much."""

    def of_a_sample() -> int:
        model = training.build(network)
        batch = training.make_batch(network, 2 * EXAMPLES)
        layers = count_layers(model, partial(training.loss_of, network, model, batch), 2 * EXAMPLES)
        return sum(layer.multiply_adds for layer in layers)

    return hollow_if_possible(of_a_sample) == counts.multiply_adds


def has_recurrent_layers(network: UserNetwork) -> bool:
    """True where the network has an RNN, GRU or LSTM of torch."""
    model = hollow_if_possible(partial(training.build, network))
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


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


def holding(network: UserNetwork, counts: Network, hardware: Hardware, batch: int) -> Holding | None:
    """Of a step of `batch` samples; None where it can only be told by computing."""
    setting = Setting(strategies.ONE_DEVICE, 1, "bf16" if hardware.is_mixed else "no")
    try:
        need = memory.need_without_computing(network, setting, batch)
    except (DependsOnNumbers, StepFailed):  # it may fail here, and not with the few samples that were counted
        return None
    (split,) = need.devices
    update_bytes = 3 * counts.parameters * GRADIENT_BYTES + 2 * split["optimizer state"]
    return Holding(need.most, update_bytes, update_bytes / (hardware.memory.bandwidth * presets.GIGABYTE))


def added_by_update(setup: Setup, held: Holding) -> float:
    """Seconds by which the update makes a step longer at least; 0 where they are not worth saying.

    A launch-bound step hides a part of them: its kernels wait for the CPU, and the update's fill that time.
    """
    kernels = setup.training.kernels(setup.batch) + held.update_seconds
    without = setup.training.compute(setup.batch)
    added = kernels - without
    return added if added > WORTH_SAYING * without else 0.0


def measured(network: Network, batch: int, milliseconds: float) -> Gpu:
    """A GPU on which the step takes the time that was measured."""
    samples_per_second = batch / (milliseconds / 1000)
    of_resnet50 = samples_per_second * max(presets.estimates(network))
    return Gpu(f"your GPU, measured: {milliseconds:g} ms for {batch}", of_resnet50)


def prediction(
    network: Network,
    gpu: Gpu,
    hardware: Hardware,
    batch: int,
    is_measured: bool = False,
    leave_out_launches: bool = False,
) -> tuple[Setup, tuple[Assumption, ...]]:
    """The setup that is predicted, and what is assumed of it. A step that was measured leaves less to assume."""
    workload = presets.training(network, gpu)
    cluster = presets.cluster(hardware.inner, hardware.network, hardware.gpus_per_node)
    if leave_out_launches:
        workload = replace(workload, launch_seconds=0.0)
    if not is_measured and leave_out_launches:
        return Setup(workload, cluster, batch), (*USUAL, of_compute(network, gpu))
    if not is_measured:
        return Setup(workload, cluster, batch), (*USUAL, LAUNCH, of_compute(network, gpu))
    # A step is no faster than its launches: where the measured one is, they take less time than is assumed.
    longest_launch = workload.kernels(batch) / network.operators
    workload = replace(workload, launch_seconds=min(workload.launch_seconds, longest_launch))
    return Setup(workload, cluster, batch), USUAL


def rows(setup: Setup, assumptions: tuple[Assumption, ...]) -> list[dict]:
    """Of each number of GPUs the step with the setup's batch on each GPU, and with the same batch in all."""
    kind = all_kind(setup, assumptions)
    harsh = all_harsh(setup, assumptions)
    found = []
    for gpus in COUNTS:
        seconds = setup.step(gpus)
        row = {
            "gpus": gpus,
            "seconds": seconds,
            "fastest": kind.step(gpus),
            "slowest": harsh.step(gpus),
            "samples_per_second": gpus * setup.batch / seconds,
            "efficiency": _worth(setup, gpus) / gpus,
            "is_launch_bound": _is_launch_bound(setup),
            "divided_seconds": None,
            "divided_is_launch_bound": None,
        }
        if gpus <= setup.batch:
            divided = replace(setup, batch=setup.batch / gpus)
            row["divided_seconds"] = divided.step(gpus)
            row["divided_is_launch_bound"] = _is_launch_bound(divided)
        found.append(row)
    return found


def _worth(setup: Setup, gpus: int) -> float:
    """How many times faster so many GPUs are than one that takes all their samples in one step.

    One GPU with one GPU's share would be no measure: a launch-bound step takes more samples in the same time, so fewer
    GPUs with more samples each would do as well.
    """
    return speed_up(setup.training, gpus * setup.batch, gpus, setup.cluster)


def _is_launch_bound(setup: Setup) -> bool:
    return setup.training.launches >= setup.training.kernels(setup.batch)


def heading(network: Network, gpu: Gpu, hardware: Hardware, batch: int) -> str:
    gradients = network.parameters * GRADIENT_BYTES / 2**20
    return "\n".join(
        [
            f"A PREDICTION, not a measurement, for a batch of {batch} on each GPU:",
            f"{network.name} on {gpu.name};",
            f"nodes of {hardware.gpus_per_node}, {hardware.inner} within, {hardware.network} between.",
            f"{network.parameters:,} parameters ({gradients:,.1f} MiB of gradients), {_short(network.multiply_adds)} "
            f"multiply-adds a sample,",
            f"{network.operators:,} operators a step.",
        ]
    )


def table(found: list[dict], batch: int) -> str:
    """The rows in 80 columns."""
    lines = [
        f"{'':5}{f'{batch} samples on each GPU (range)':^54}{f'{batch} samples in all':>21}",
        f"{'GPUs':>5}{'samples/s':>25}{'ms a step':>21}{'worth':>8}{'ms a step':>12}{'faster':>9}",
    ]
    alone = found[0]["seconds"]
    for row in found:
        samples = row["gpus"] * batch
        rate = f"{_short(row['samples_per_second'])}"
        rates = f"({_short(samples / row['slowest'])}–{_short(samples / row['fastest'])})"
        time = _marked(row["seconds"], row["is_launch_bound"])
        times = f"({milliseconds(row['fastest'])}–{milliseconds(row['slowest'])})"
        line = f"{row['gpus']:>5}{rate:>9}{rates:>16}{time:>8}{times:>13}{row['efficiency']:>8.0%}"
        if row["divided_seconds"] is not None:
            divided = _marked(row["divided_seconds"], row["divided_is_launch_bound"])
            line += f"{divided:>12}{alone / row['divided_seconds']:>8.1f}×"
        lines.append(line)
    lines += [
        "",
        "worth: the speed-up over one GPU that takes the samples of all, for each GPU.",
        "faster: the speed-up over one GPU. Range: what unpublished inputs leave.",
    ]
    if any(row["is_launch_bound"] or row["divided_is_launch_bound"] for row in found):
        lines.append("*: launch-bound. Starting the operators takes longer than running them, so fewer")
        lines.append("samples take no less time, and fewer GPUs with more samples each do as well.")
    return "\n".join(lines)


def _marked(seconds: float, is_launch_bound: bool) -> str:
    return f"*{milliseconds(seconds)}" if is_launch_bound else milliseconds(seconds)


def _short(count: float) -> str:
    """Three digits and the prefix of a unit."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:#.3g}{prefix}".replace(f".{prefix}", prefix)
    return f"{count:.0f}"


def verdict(setup: Setup, found: list[dict], is_measured: bool, update_seconds: float = 0.0) -> list[str]:
    """The number of GPUs to take, why, and what would change it, a line each.

    Args:
        update_seconds: of the optimizer's update, which the rows leave out, where that is worth saying.
    """
    most = _most_that_pay(found)
    each = f"{setup.batch} samples on each"
    if most["gpus"] == 1:
        looked_at = found[1]
        first = f"Stay on one GPU (level 00): two are worth {2 * looked_at['efficiency']:.1f} with {each}."
    else:
        looked_at = most
        worth = most["gpus"] * most["efficiency"]
        first = (
            f"Take DDP (level 02, 03 or 04): up to {most['gpus']} GPUs pay, which are worth {worth:.1f} with {each}."
        )
    change = _change(setup, most["gpus"])
    if not is_measured:
        change += " A step that you measured, --measured-ms, narrows the range."
    return [first, f"Why: {_why(setup, found[0], looked_at, update_seconds)}", f"What would change it: {change}"]


def _most_that_pay(found: list[dict]) -> dict:
    """The row before the first one that is worth less than PAYS."""
    most = found[0]
    for row in found[1:]:
        if row["efficiency"] < PAYS:
            break
        most = row
    return most


def _why(setup: Setup, alone: dict, together: dict, update_seconds: float) -> str:
    gradients = setup.training.network.parameters * GRADIENT_BYTES / 2**20
    added = together["seconds"] - alone["seconds"]
    update = ""
    if update_seconds:
        update = f", and its update takes {milliseconds(update_seconds)} ms more"
    line = (
        f"a step computes for {milliseconds(alone['seconds'])} ms{update}. On {together['gpus']} GPUs the all-reduces "
        f"of {gradients:,.1f} MiB and the slowest GPU add {milliseconds(added)} ms."
    )
    if _is_launch_bound(setup):
        free = setup.training.launches / setup.training.sample_seconds
        line += (
            " Starting the operators takes longer than running them: a larger batch is free, up to some "
            f"{free:,.0f} samples."
        )
    return line


def _change(setup: Setup, gpus: int) -> str:
    """What would make more GPUs pay than `gpus`, or fewer where all do."""
    if gpus == COUNTS[-1]:
        least = _pays_from_batch(setup, gpus, 1) or 1
        line = f"fewer than {least} samples on each" if least > 1 else "not the batch: they pay with 1 sample on each"
        if setup.cluster.network == presets.NETWORK[SLOWEST_NETWORK]:
            return f"{line}."
        worth = _worth(_with_network(setup, SLOWEST_NETWORK), gpus)
        return f"{line}. With --network {SLOWEST_NETWORK} they are worth {worth:.0f}."
    more = 2 * gpus
    batch = _pays_from_batch(setup, more, 2 * setup.batch)
    if batch is None:
        line = f"no larger batch makes {more} GPUs worth {PAYS:.0%}"
    else:
        line = f"a larger batch: from {batch} samples on each on, {more} GPUs are worth {PAYS:.0%}"
    if more > setup.cluster.gpus_per_node and setup.cluster.network != presets.NETWORK[FASTEST_NETWORK]:
        worth = _worth(_with_network(setup, FASTEST_NETWORK), more)
        line += f". With --network {FASTEST_NETWORK} they are worth {worth:.1f}"
    return f"{line}."


def _with_network(setup: Setup, network: str) -> Setup:
    return replace(setup, cluster=replace(setup.cluster, network=presets.NETWORK[network]))


def _pays_from_batch(setup: Setup, gpus: int, batch: float) -> int | None:
    """The first batch of each GPU with which so many of them are worth PAYS: `batch`, twice as many, and so on."""
    while batch <= LARGEST_BATCH:
        if _worth(replace(setup, batch=batch), gpus) >= PAYS * gpus:
            return int(batch)
        batch *= 2
    return None


def _write_page(path: Path, start: Start) -> None:
    try:
        write_atomically(path, page(start))
    except OSError as error:
        fail(f"--page: {error}")
    print(f"\nWritten to {path}")
