"""Inputs of a prediction that nobody has published, and the range that they leave.

Each has two ends: the kind one, with which the least time is lost, and the harsh one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.predict import presets
from benchmarks.predict.all_reduce import Cluster
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import Gpu
from benchmarks.predict.step import Network, Workload, step


class Assumption(NamedTuple):
    """An input that is not published: what it stands for, and the kindest and the harshest value of it."""

    name: str
    kind: float
    harsh: float


SPREAD = Assumption("speed_spread", 0.0, presets.LARGEST_SPEED_SPREAD)
OVERLAP = Assumption("contention", 0.0, presets.LARGEST_CONTENTION)
BACKWARD = Assumption("backward_share", 0.7, 0.6)
# NCCL's messages of protocol LL wait 2.7 µs in place of 9.6, and a long ring's large ones 1.9 times as long.
LATENCY = Assumption("latency", 2.7 / 9.6, 1.9)
LAUNCH = Assumption("launch", 0.5, 2.0)
USUAL = (SPREAD, OVERLAP, BACKWARD, LATENCY)
LONGER_THAN_BOTH = 1.17  # of Inception V3 on a P100: what it takes over the longer one of two estimates


def of_compute(network: Network, gpu: Gpu) -> Assumption:
    """How long a sample computes, as a factor of the longer one of two estimates. See `presets` for both."""
    estimates = presets.estimates(network)
    is_resnet50 = network.layers == networks()["ResNet-50"].layers
    shortest = min(estimates) / max(estimates) / gpu.fastest
    return Assumption("compute", shortest, 1.0 if is_resnet50 else LONGER_THAN_BOTH)


@dataclass(frozen=True)
class Setup:
    """All that the time of a step follows from but the number of GPUs.

    Attributes:
        batch: samples for each GPU.
    """

    training: Workload
    cluster: Cluster
    batch: float

    def step(self, gpus: int) -> float:
        """Seconds of a step on `gpus` GPUs."""
        return step(self.training, self.batch, gpus, self.cluster)


def assuming(setup: Setup, name: str, value: float) -> Setup:
    """The same setup with another value for one assumption; times and bandwidths are multiplied by theirs."""
    training = setup.training
    cluster = setup.cluster
    match name:
        case "speed_spread" | "contention" | "backward_share":
            return replace(setup, training=replace(training, **{name: value}))
        case "launch":
            return replace(setup, training=replace(training, launch_seconds=training.launch_seconds * value))
        case "compute":
            return replace(setup, training=replace(training, sample_seconds=training.sample_seconds * value))
        case "batch":
            return replace(setup, batch=value)
        case "latency":
            inner = cluster.inner._replace(latency=cluster.inner.latency * value)
            network = cluster.network._replace(latency=cluster.network.latency * value)
            return replace(setup, cluster=replace(cluster, inner=inner, network=network))
        case "bandwidth":
            network = cluster.network._replace(bandwidth=cluster.network.bandwidth * value)
            return replace(setup, cluster=replace(cluster, network=network))
    raise ValueError(f"no assumption {name!r}")


def all_kind(setup: Setup, assumptions: Iterable[Assumption]) -> Setup:
    """The setup with the kind end of every assumption."""
    for assumption in assumptions:
        setup = assuming(setup, assumption.name, assumption.kind)
    return setup


def all_harsh(setup: Setup, assumptions: Iterable[Assumption]) -> Setup:
    """The setup with the harsh end of every assumption."""
    for assumption in assumptions:
        setup = assuming(setup, assumption.name, assumption.harsh)
    return setup
