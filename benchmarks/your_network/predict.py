"""Question 2: how fast would a step be on 1 to 512 GPUs, and how many would pay?

The model is `benchmarks.predict`'s, and so are links and GPUs. Here the network is counted: its multiply-adds,
attention's too, its gradients' bytes and its operators. Nothing is computed (see `hollow`).

An RNN, GRU or LSTM of torch is counted as a CPU runs it: each time step has operators of its own. On a GPU it is one
operator of torch, for which cuDNN fuses the operations of a time step and batches those of several (Appleyard et al.,
"Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). How many kernels that makes is not published, so
the time of launches is left out of such a network's prediction, and the answer says so.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.predict import presets
from benchmarks.predict.assumptions import LAUNCH, USUAL, Assumption, Setup, all_harsh, all_kind, of_compute
from benchmarks.predict.count import count_network
from benchmarks.predict.page import Start, page
from benchmarks.predict.presets import Gpu, Hardware
from benchmarks.predict.step import GRADIENT_BYTES, Network, weak_efficiency
from benchmarks.predict.table import milliseconds
from benchmarks.your_network import flags, training
from benchmarks.your_network.flags import positive
from benchmarks.your_network.hollow import DependsOnNumbers, hollow
from benchmarks.your_network.spec import UserNetwork
from common.errors import fail
from common.files import write_atomically

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs
PAYS = 0.9  # the efficiency from which on GPUs are said to pay
HELP = "how fast a step would be on 1 to 512 GPUs"


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_network(parser)
    flag = parser.add_argument
    usual = Hardware()
    flag("--batch", type=positive, default=64, metavar="N", help="samples of a step on one GPU (64)")
    flag("--gpu", choices=presets.GPUS, default=usual.gpu, help="kind of GPU (%(default)s)")
    flag("--inner", choices=presets.INNER, default=usual.inner, help="links between a node's GPUs (%(default)s)")
    flag("--network", choices=presets.NETWORK, default=usual.network, help="network cards of a node (%(default)s)")
    sizes = {"choices": presets.NODE_SIZES, "default": usual.gpus_per_node}
    flag("--gpus-per-node", type=int, **sizes, metavar="N", help="1, 2, 4 or 8 (%(default)s)")
    flag(
        "--measured-ms", type=_above_zero, metavar="T", help="a step of --batch samples on one GPU, if you measured it"
    )
    flag("--page", type=Path, metavar="PATH", help="write a page with sliders too, which starts with these flags")
    flags.add_json(parser)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def answer(options: argparse.Namespace) -> None:
    users = flags.network(options)
    network = counted(users)
    recurrent = has_recurrent_layers(users)
    hardware = Hardware(options.gpu, options.inner, options.network, options.gpus_per_node)
    gpu = presets.GPUS[options.gpu]
    if options.measured_ms:
        gpu = measured(network, options.batch, options.measured_ms)
    setup, assumptions = prediction(network, gpu, hardware, options.batch, bool(options.measured_ms), recurrent)
    found = rows(setup, assumptions)
    print(heading(network, gpu, hardware))
    if recurrent:
        print("Its recurrent layers are counted step by step in time. cuDNN fuses these operators,")
        print("so the time of launching them is left out: measure a step for --measured-ms.")
    print()
    print(table(found, options.batch))
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
            "launches_left_out": recurrent,
            "bytes_of_a_sample": network.bytes_of_a_sample,
        },
        "hardware": hardware._asdict(),
        "gpu": gpu.name,
        "batch": options.batch,
        "predict": found,
    }
    flags.conclude(options, verdict(setup, found, bool(options.measured_ms)), record)


def counted(network: UserNetwork) -> Network:
    """The network as `benchmarks.predict` takes it.

    Raises:
        UserError: if the network, its batch or its loss does not work.
    """
    try:
        with hollow():
            return _counted(network)
    except DependsOnNumbers:
        return _counted(network)


def _counted(network: UserNetwork) -> Network:
    model = training.build(network)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = training.make_optimizer(network, trained)

    def loss(batch: Any) -> Tensor:
        return training.loss_of(network, model, batch)

    with training.explained(f"a step of {network.title} failed"):
        counts = count_network(network.title, model, optimizer, partial(training.make_batch, network), loss)
    if not counts.multiply_adds:
        fail(f"{network.title} multiplies nothing, so no time can be predicted from its operations")
    return counts


def has_recurrent_layers(network: UserNetwork) -> bool:
    """True where the network has an RNN, GRU or LSTM of torch."""
    try:
        with hollow():
            model = training.build(network)
    except DependsOnNumbers:
        model = training.build(network)
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


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
            "efficiency": setup.step(1) / seconds,
            "divided_seconds": None,
        }
        if gpus <= setup.batch:
            row["divided_seconds"] = replace(setup, batch=setup.batch / gpus).step(gpus)
        found.append(row)
    return found


def heading(network: Network, gpu: Gpu, hardware: Hardware) -> str:
    gradients = network.parameters * GRADIENT_BYTES / 2**20
    return "\n".join(
        [
            f"A PREDICTION, not a measurement: {network.name} on {gpu.name};",
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
        time = milliseconds(row["seconds"])
        times = f"({milliseconds(row['fastest'])}–{milliseconds(row['slowest'])})"
        line = f"{row['gpus']:>5}{rate:>9}{rates:>16}{time:>8}{times:>13}{row['efficiency']:>8.0%}"
        if row["divided_seconds"] is not None:
            line += f"{milliseconds(row['divided_seconds']):>12}{alone / row['divided_seconds']:>8.1f}×"
        lines.append(line)
    lines += [
        "",
        "worth: the efficiency, throughput as a share of so many times that of one GPU.",
        "faster: the speed-up over one GPU. Range: what unpublished inputs leave.",
    ]
    return "\n".join(lines)


def _short(count: float) -> str:
    """Three digits and the prefix of a unit."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:#.3g}{prefix}".replace(f".{prefix}", prefix)
    return f"{count:.0f}"


def verdict(setup: Setup, found: list[dict], is_measured: bool) -> list[str]:
    """The number of GPUs to take, why, and what would change it, a line each."""
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
    return [first, f"Why: {_why(setup, found[0], looked_at)}", f"What would change it: {_change(setup, is_measured)}"]


def _most_that_pay(found: list[dict]) -> dict:
    """The row before the first one that is worth less than PAYS."""
    most = found[0]
    for row in found[1:]:
        if row["efficiency"] < PAYS:
            break
        most = row
    return most


def _why(setup: Setup, alone: dict, together: dict) -> str:
    gradients = setup.training.network.parameters * GRADIENT_BYTES / 2**20
    added = together["seconds"] - alone["seconds"]
    line = (
        f"a step computes for {milliseconds(alone['seconds'])} ms. On {together['gpus']} GPUs the all-reduces of "
        f"{gradients:,.1f} MiB and the slowest GPU add {milliseconds(added)} ms."
    )
    if setup.training.launches >= setup.training.kernels(setup.batch):
        line += " Starting the operators takes longer than running them: a larger batch is free."
    return line


def _change(setup: Setup, is_measured: bool) -> str:
    gpus = COUNTS[-1]
    other = "25g" if setup.cluster.network != presets.NETWORK["25g"] else "8x400g"
    cluster = replace(setup.cluster, network=presets.NETWORK[other])
    worth = gpus * weak_efficiency(setup.training, setup.batch, gpus, cluster)
    line = f"with --network {other}, {gpus} GPUs would be worth {worth:.0f}"
    batch = _pays_from_batch(setup, gpus)
    if batch is None:
        line += f"; with this one no batch makes them worth {PAYS:.0%}."
    elif batch > 1:
        line += f"; with this one {PAYS:.0%} from {batch} samples on each on."
    else:
        line += "; with this one they pay at any batch."
    return line if is_measured else f"{line} A step that you measured, --measured-ms, narrows the range."


def _pays_from_batch(setup: Setup, gpus: int) -> int | None:
    """The smallest batch of each GPU, a power of two, with which so many of them are worth PAYS."""
    for exponent in range(17):
        batch = 2**exponent
        if weak_efficiency(setup.training, batch, gpus, setup.cluster) >= PAYS:
            return batch
    return None


def _write_page(path: Path, start: Start) -> None:
    try:
        write_atomically(path, page(start))
    except OSError as error:
        fail(f"--page: {error}")
    print(f"\nWritten to {path}")
