"""The prediction in the terminal: from which batch on GPUs pay, and the published cases."""

from typing import NamedTuple

from benchmarks.predict.all_reduce import Cluster
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Gpu, training
from benchmarks.predict.published import WITHIN, Case, cases, off_by, predict
from benchmarks.predict.step import pays_from, weak_efficiency

COUNTS = (2, 8, 64, 512)
MISSING = "–"


class Row(NamedTuple):
    """Of a network on so many GPUs: the smallest global batches that pay, None where none does.

    `faster`: they are faster than one. `half`: they are worth half as many. `most`: they are worth 90 % as many.
    `lost`: the share of the throughput that is lost with 64 samples for each GPU.
    """

    network: str
    gpus: int
    faster: int | None
    half: int | None
    most: int | None
    lost: float


def rows(gpu: Gpu, cluster: Cluster) -> list[Row]:
    """All networks on 2, 8, 64 and 512 GPUs."""
    found = []
    for network in networks().values():
        trained = training(network, gpu)
        for gpus in COUNTS:
            faster = pays_from(trained, gpus, cluster, 1 / gpus)
            half = pays_from(trained, gpus, cluster, 0.5)
            most = pays_from(trained, gpus, cluster, 0.9)
            lost = 1 - weak_efficiency(trained, 64, gpus, cluster)
            found.append(Row(network.name, gpus, faster, half, most, lost))
    return found


def pay_table(gpu: Gpu, cluster: Cluster) -> str:
    """From which global batch on 2, 8, 64 and 512 GPUs pay, in 80 columns."""
    lines = [
        f"A PREDICTION, not a measurement: {gpu.name}.",
        "The smallest global batch (a power of two) with which so many GPUs, on the same",
        "batch, are faster than one; worth half as many; worth 90 % as many. The last",
        "column is the throughput lost with 64 samples for each GPU (weak scaling).",
        "",
        f"{'network':<14}{'GPUs':>5}{'faster':>12}{'worth 50 %':>13}{'worth 90 %':>13}{'lost at 64':>13}",
    ]
    for row in rows(gpu, cluster):
        batches = f"{batch_text(row.faster):>12}{batch_text(row.half):>13}{batch_text(row.most):>13}"
        lines.append(f"{row.network:<14}{row.gpus:>5}{batches}{row.lost:>13.1%}")
    return "\n".join(lines)


def batch_text(size: int | None) -> str:
    """A number of samples as the tables show it."""
    return MISSING if size is None else f"{size:,}"


def published_table() -> str:
    """Predictions of the model for published cases, beside what was measured."""
    lines = [
        "Held against published measurements, none of which it was fitted to: lost",
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
