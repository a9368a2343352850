"""The prediction in the terminal: from which batch on GPUs pay, and the published cases."""

from typing import NamedTuple

from benchmarks.predict.all_reduce import Cluster
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Gpu, training
from benchmarks.predict.published import WITHIN, Case, cases, off_by, predict
from benchmarks.predict.step import pays_from, step, weak_efficiency

COUNTS = (2, 8, 64, 512)
BATCH = 64  # of each GPU, for the times
MISSING = "–"


class Row(NamedTuple):
    """Of a network on so many GPUs: the step, and the smallest global batches that pay, None where none does.

    `seconds`: of a step with BATCH samples on each GPU. `lost`: the share of the throughput that is lost then.
    `faster`: the GPUs are faster than one. `half`: they are worth half as many. `most`: they are worth 90 % as many.
    """

    network: str
    gpus: int
    seconds: float
    lost: float
    faster: int | None
    half: int | None
    most: int | None


def rows(gpu: Gpu, cluster: Cluster) -> list[Row]:
    """All networks on 2, 8, 64 and 512 GPUs."""
    found = []
    for network in networks().values():
        trained = training(network, gpu)
        for gpus in COUNTS:
            seconds = step(trained, BATCH, gpus, cluster)
            lost = 1 - weak_efficiency(trained, BATCH, gpus, cluster)
            faster = pays_from(trained, gpus, cluster, 1 / gpus)
            half = pays_from(trained, gpus, cluster, 0.5)
            most = pays_from(trained, gpus, cluster, 0.9)
            found.append(Row(network.name, gpus, seconds, lost, faster, half, most))
    return found


def pay_table(gpu: Gpu, cluster: Cluster) -> str:
    """The time of a step on 1 to 512 GPUs, and from which global batch on they pay, in 80 columns."""
    by_network: dict[str, list[Row]] = {}
    for row in rows(gpu, cluster):
        by_network.setdefault(row.network, []).append(row)
    lines = [
        f"A PREDICTION, not a measurement: {gpu.name}.",
        "",
        f"Milliseconds of a step with {BATCH} samples on each GPU, and how much of the",
        "throughput is lost (weak scaling).",
        "",
        f"{'network':<14}{'1 GPU':>9}" + "".join(f"{f'{gpus} GPUs':>14}" for gpus in COUNTS),
    ]
    for name, of_network in by_network.items():
        alone = training(networks()[name], gpu).compute(BATCH)
        cells = [f"{milliseconds(row.seconds):>9}{row.lost:>5.0%}" for row in of_network]
        lines.append(f"{name:<14}{milliseconds(alone):>9}{''.join(cells)}")
    lines += [
        "",
        "The smallest global batch (a power of two) with which so many GPUs, on the same",
        "batch, are faster than one / worth 90 % as many (strong scaling).",
        "",
        f"{'network':<14}" + "".join(f"{f'{gpus} GPUs':>16}" for gpus in COUNTS),
    ]
    for name, of_network in by_network.items():
        batches = [f"{batch_text(row.faster)} / {batch_text(row.most)}" for row in of_network]
        lines.append(f"{name:<14}" + "".join(f"{cell:>16}" for cell in batches))
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """The number of milliseconds, with three digits or more."""
    value = 1000 * seconds
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def batch_text(size: int | None) -> str:
    """A number of samples as the tables show it."""
    return MISSING if size is None else f"{size:,}"


def published_table() -> str:
    """Predictions of the model for published cases, beside what was measured."""
    lines = [
        "Compared with published measurements, none of which it was fitted to: lost",
        "efficiency, which is 100 % minus the efficiency. “Network” is without slow GPUs",
        "and contention; the range is what the assumptions leave.",
        "",
        f"{'case':<40}{'published':>10}{'predicted':>10}{'range':>12}{'network':>8}",
    ]
    for case in cases():
        lines.append(_published_row(case))
    lines.append("")
    lines.append(f"*: not all inputs are published. !: off by more than a factor of {WITHIN}.")
    return "\n".join(lines)


def _published_row(case: Case) -> str:
    prediction = predict(case)
    span = f"{100 * prediction.kind:.0f}–{100 * prediction.harsh:.0f} %"
    marks = "" if case.inputs_are_published else "*"
    if off_by(case) > WITHIN:
        marks += "!"
    figures = f"{1 - case.efficiency:>10.1%}{prediction.lost:>10.1%}{span:>12}{prediction.network_alone:>8.1%}"
    return f"{case.name + marks:<40}{figures}"


def pay_markdown(gpu: Gpu, cluster: Cluster) -> str:
    """The batches from which on GPUs are faster than one, and worth 90 % as many, as a table for a README."""
    lines = ["| network | 2 GPUs | 8 GPUs | 64 GPUs | 512 GPUs |", "|---|--:|--:|--:|--:|"]
    cells: dict[str, list[str]] = {}
    for row in rows(gpu, cluster):
        cell = f"{batch_text(row.faster)} / {batch_text(row.most)}"
        cells.setdefault(row.network, []).append(cell)
    for network, of_network in cells.items():
        lines.append(f"| {network} | {' | '.join(of_network)} |")
    return "\n".join(lines)


def published_markdown() -> str:
    """The published cases as a table for a README."""
    lines = ["| case | published | predicted | range | network alone |", "|---|--:|--:|--:|--:|"]
    for case in cases():
        prediction = predict(case)
        mark = "" if case.inputs_are_published else " (\\*)"
        span = f"{100 * prediction.kind:.0f} to {100 * prediction.harsh:.0f} %"
        measured = f"{1 - case.efficiency:.1%} | {prediction.lost:.1%}"
        lines.append(f"| {case.name}{mark} | {measured} | {span} | {prediction.network_alone:.1%} |")
    return "\n".join(lines)
