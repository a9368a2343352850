"""Ways to hide or save communication: overlap, the size of buckets, no_sync, fp16, bf16 and PowerSGD.

Two nodes (see `benchmarks.harness.two_nodes`), a rank on each, one core and one thread each, over 1 Gbit/s; those ways
that still differ there also over 100 Mbit/s. The ways of `benchmarks.harness.gradient_averaging` take turns. Beside the
time stand the bytes that a rank sent, counted at its network interface, and how far the weights drift where the
gradients are compressed.
"""

import statistics
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

import numpy

from benchmarks.harness import records
from benchmarks.harness.gradient_averaging import ALONE, ALONE_TWICE, BATCH, NAIVE, NO_SYNC, TORCH, WAYS, baseline
from benchmarks.harness.groups import CannotMeasure, Group
from benchmarks.harness.groups import Extent as SessionExtent
from benchmarks.harness.overlap_rank import train
from benchmarks.harness.paired import Samples, measure
from benchmarks.harness.two_nodes import why_not
from benchmarks.suites.network import Network, network
from common.processes import ranks

FAST = "1 Gbit/s"
SLOW = "100 Mbit/s"
LINKS = (FAST, SLOW)
# The slow link makes no difference between sizes of buckets: there is nothing left to hide behind.
ON_THE_SLOW_LINK = (ALONE, ALONE_TWICE, NAIVE, TORCH, NO_SYNC, "fp16", "bf16", "PowerSGD")
TIMEOUT = 900  # seconds, for one training


class Extent(NamedTuple):
    """The amount of measuring."""

    ways: tuple[str, ...]
    steps: int  # of a sample
    rounds: int
    training_steps: int  # of which the drift is taken: enough of them that the network has learned something


FULL = Extent(ways=tuple(WAYS), steps=2, rounds=10, training_steps=200)
QUICK = Extent(ways=(ALONE, ALONE_TWICE, NAIVE, TORCH, NO_SYNC, "fp16"), steps=1, rounds=2, training_steps=5)


class Drift(NamedTuple):
    """The distance of a training from torch's DDP, and its result.

    Attributes:
        share: the distance between its last weights and those of torch's DDP, as a share of the distance that torch's
            went from the start.
        loss: on digits that were not trained on.
    """

    share: float
    loss: float


class Link:
    """One link between the two nodes, on which the ways take turns.

    Attributes:
        sent: of each way the bytes that a rank sent for one backward, one number a round.
        process: of each way how a rank is set, see `process_facts`.
    """

    def __init__(self, net: Network, name: str, steps: int) -> None:
        self.name = name
        self.sent: dict[str, list[float]] = {}
        self.process: dict[str, dict] = {}
        self._net = net
        self._steps = steps

    def contestants(self, ways: Iterable[str]) -> dict[str, Callable[[], float]]:
        """Of each way its sample: milliseconds for one backward."""
        return {way: partial(self._milliseconds, way) for way in ways}

    def _milliseconds(self, way: str) -> float:
        """By the slower rank's clock."""
        self._net.limit(self.name)
        answers = self._net.ask("time_steps", way=way, steps=self._steps)
        sent = max(answer["bytes"] for answer in answers)
        self.sent.setdefault(way, []).append(sent)
        self.process[way] = answers[0]["process"]
        return 1000 * max(answer["seconds"] for answer in answers)


def title(link: str) -> str:
    return f"averaging gradients over {link}, {BATCH} images a backward"


def groups() -> list[Group]:
    """A group for each link; whether there can be two nodes here shows when it is measured."""
    fast = Group(FAST, title(FAST), FULL.ways, partial(measured, FAST))
    slow = Group(SLOW, title(SLOW), ON_THE_SLOW_LINK, partial(measured, SLOW))
    return [fast, slow]


def measured(link: str, rows: tuple[str, ...], extent: SessionExtent) -> dict:
    """The record of these rows, and of the steps without averaging, to which the others are compared."""
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    if extent.quick and link == SLOW:
        raise CannotMeasure(f"--quick measures over {FAST} only")
    own = QUICK if extent.quick else FULL
    needed = {*rows, *map(baseline, rows)}
    ways = tuple(way for way in own.ways if way in needed)
    with network() as net:
        return measured_over(net, link, own._replace(ways=ways, rounds=extent.rounds))


def measured_over(net: Network, name: str, extent: Extent) -> dict:
    """The record of one link, with the drift of the ways that compress."""
    drift = drifts(extent.ways, extent.training_steps)
    link = Link(net, name, extent.steps)
    samples = measure(link.contestants(extent.ways), extent.rounds)
    return record(link, samples, drift, extent.training_steps)


def drifts(ways: Iterable[str], steps: int) -> dict[str, Drift]:
    """Of those of `ways` that compress, of torch's DDP, and of the naive way, which must end with the same weights."""
    trained = {}
    for way in ways:
        if way in (TORCH, NAIVE) or WAYS[way].compresses:
            trained[way] = _trained(way, steps)
    reference = _trained(TORCH, steps)
    return {way: _drift(result, reference) for way, result in trained.items()}


@cache  # the links share it
def _trained(way: str, steps: int) -> dict:
    return ranks(2, on_cpu=True).run(train, way, steps, timeout=TIMEOUT)[0]


def _drift(trained: dict, reference: dict) -> Drift:
    apart = numpy.linalg.norm(trained["end"] - reference["end"])
    went = numpy.linalg.norm(reference["end"] - reference["start"])
    return Drift(float(apart / went), trained["loss"])


def record(link: Link, samples: Samples, drift: dict[str, Drift], training_steps: int) -> dict:
    """The group of `benchmarks.harness.records` for one link: milliseconds for one backward of each way."""
    facts: dict[str, dict] = {}
    for way in samples:
        sent = statistics.median(link.sent[way])
        facts[way] = {
            "bytes_per_backward": round(sent),
            "backwards_per_step": WAYS[way].backwards,
            "compresses": WAYS[way].compresses,
            **link.process[way],
        }
        if way in drift:
            facts[way] |= {"drift": records.rounded(drift[way].share), "loss": records.rounded(drift[way].loss)}
    averaging = [way for way in samples if WAYS[way].averages]
    ratios = [(way, NAIVE) for way in averaging if way != NAIVE]
    differences = [(way, baseline(way)) for way in averaging]
    group = records.group(title(link.name), "ms", samples, facts, ratios, differences)
    group["link"] = link.name
    group["training_steps"] = training_steps
    group["notes"] = notes(group)
    return group


def added(group: dict) -> dict[str, dict]:
    """By way, what averaging adds to a backward, in milliseconds: the pair of `benchmarks.harness.records`.

    It is the median over the rounds of the difference to the step of the same round that computes the same.
    """
    return {pair["of"]: pair for pair in group["pairs"] if pair["kind"] == "difference"}


def notes(group: dict) -> list[str]:
    """Of each way what averaging adds, the bytes, and where the weights went."""
    differences = added(group)
    lines = ["For one backward: what averaging adds, and what a rank sends. Drift of the weights from torch's DDP:"]
    lines.append(f"  {'':<34}{'added ms':>10}{'MB':>8}{'drift':>10}{'loss':>8}")
    for way, pair in differences.items():
        row = group["rows"][way]
        megabytes = f"{row['bytes_per_backward'] / 1e6:.2f}"
        line = f"  {way:<34}{pair['median']:>10.0f}{megabytes:>8}"
        if "drift" in row:
            line += f"{row['drift']:>10.2g}{row['loss']:>8.3f}"
        lines.append(line)
    steps = group["training_steps"]
    lines.append(f"Drift: the distance of the weights after {steps} steps, as a share of how far torch's went.")
    lines.append("Loss: on digits that were not trained on; 2.3 is that of guessing.")
    lines.append("no_sync averages half as often: its global batch is twice as large.")
    return lines


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_overlap")
