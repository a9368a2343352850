"""The time of a step of data-parallel training: compute, and the part of the all-reduces that backward does not hide.

    step = forward + max(backward, end of the last all-reduce) + what is left of the step

Three effects are in it besides the all-reduce itself, each with a published size (see `presets`):

- A step is launch-bound where starting its kernels takes longer than running them.
- All GPUs wait for the slowest of them. Their speeds differ, though they are of one kind.
- Backward is slower while an all-reduce runs beside it on the same GPU.

The second and the third make kernels slower. A launch-bound step hides them as long as its kernels still end in time.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.predict.all_reduce import Cluster, all_reduce

GRADIENT_BYTES = 4  # float32


class Layer(NamedTuple):
    """A module's parameters, of which it may have none, and the multiply-adds of its forward for one sample."""

    parameters: int
    multiply_adds: int


class Gradient(NamedTuple):
    """The gradient of a layer: its bytes, and after which share of backward it is there."""

    size: float
    share: float


@dataclass(frozen=True)
class Network:
    """A network, as far as a prediction knows it.

    Attributes:
        layers: in the order of forward.
        operators: how many one training step runs.
        bytes_of_a_sample: by how many bytes more these operators read and write for each sample of the batch.
    """

    name: str
    layers: tuple[Layer, ...]
    operators: int
    bytes_of_a_sample: int = 0

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @functools.cached_property
    def multiply_adds(self) -> int:
        return sum(layer.multiply_adds for layer in self.layers)

    @functools.cached_property
    def gradients(self) -> list[Gradient]:
        """In the order in which backward computes them, the last layer's first; its time is as the multiply-adds."""
        done = 0
        gradients = []
        for layer in reversed(self.layers):
            done += layer.multiply_adds
            if layer.parameters:
                gradients.append(Gradient(layer.parameters * GRADIENT_BYTES, done / self.multiply_adds))
        return gradients


class Buckets(NamedTuple):
    """The rule by which gradients are sent.

    Attributes:
        size: bytes at which a bucket is full.
        first: the same for the first bucket.
        waits_until_full: True is DDP's rule: a bucket is sent when it is full, whole layers at a time. False is
            Horovod's: as soon as the network is free, all gradients that are there are sent, up to `size`.
    """

    size: float = 25 * 2**20
    first: float = 2**20
    waits_until_full: bool = True


DDP = Buckets()
HOROVOD = Buckets(size=64 * 2**20, first=64 * 2**20, waits_until_full=False)


@dataclass(frozen=True)
class Workload:
    """A network on one kind of GPU.

    Attributes:
        network: what is trained.
        sample_seconds: seconds that one GPU computes for one sample of a step, where launches do not bound it.
        launch_seconds: seconds to start one operator from Python.
        backward_share: the part of the step that backward takes.
        buckets: when gradients are sent.
        speed_spread: standard deviation of the GPUs' times for the same work, as a share of it.
        contention: by which share backward is slower while an all-reduce runs.
    """

    network: Network
    sample_seconds: float
    launch_seconds: float
    backward_share: float = 2 / 3
    buckets: Buckets = DDP
    speed_spread: float = 0.0
    contention: float = 0.0

    def kernels(self, batch: float) -> float:
        """Seconds that the kernels of a step of `batch` samples run on one GPU."""
        return batch * self.sample_seconds

    @property
    def launches(self) -> float:
        """Seconds that the CPU needs to start the kernels of a step, however small it is."""
        return self.network.operators * self.launch_seconds

    def compute(self, batch: float) -> float:
        """Seconds of a step of `batch` samples on one GPU alone."""
        return max(self.kernels(batch), self.launches)


class Transfer(NamedTuple):
    """One all-reduce: seconds since backward began."""

    start: float
    end: float


def step(training: Workload, batch: float, gpus: int, cluster: Cluster) -> float:
    """Seconds of a step on `gpus` GPUs with `batch` samples each.

    Raises:
        ValueError: as `all_reduce` does.
    """
    if gpus == 1:
        return training.compute(batch)
    kernels = training.kernels(batch) * (1 + training.speed_spread * expected_maximum(gpus))
    compute = max(kernels, training.launches)
    backward = compute * training.backward_share
    # How far backward is slowed down follows from the transfers beside a backward that is not.
    hidden = 0.0
    for transfer in transfers(training, backward, gpus, cluster):
        hidden += min(transfer.end, backward) - min(transfer.start, backward)
    # A launch-bound GPU is idle between its kernels, so only a part of that time is a kernel's.
    hidden_kernels = hidden * kernels / compute
    slowed_kernels = kernels * training.backward_share + training.contention * hidden_kernels
    slowed = max(slowed_kernels, backward)
    *_, last = transfers(training, slowed, gpus, cluster)
    return compute - backward + max(slowed, last.end)


def speed_up(training: Workload, global_batch: float, gpus: int, cluster: Cluster) -> float:
    """Strong scaling: how many times faster `gpus` GPUs take a step of `global_batch` samples than one does."""
    return training.compute(global_batch) / step(training, global_batch / gpus, gpus, cluster)


def pays_from(training: Workload, gpus: int, cluster: Cluster, efficiency: float, most: int = 2**24) -> int | None:
    """The smallest global batch, a power of two, on which the speed-up is more than `efficiency` · `gpus`.

    It is None if there is none up to `most` samples. An efficiency of 1 / `gpus` asks where they are faster than one.
    """
    global_batch = gpus
    while global_batch <= most:
        if speed_up(training, global_batch, gpus, cluster) > efficiency * gpus:
            return global_batch
        global_batch *= 2
    return None


def transfers(training: Workload, backward: float, gpus: int, cluster: Cluster) -> Iterator[Transfer]:
    """The all-reduces of a step whose backward takes `backward` seconds, in order; there is at least one."""
    rule = _when_full if training.buckets.waits_until_full else _when_free
    return rule(training.network.gradients, training.buckets, backward, gpus, cluster)


def _when_full(
    gradients: list[Gradient], buckets: Buckets, backward: float, gpus: int, cluster: Cluster
) -> Iterator[Transfer]:
    end = 0.0
    size = 0.0
    limit = buckets.first
    for number, gradient in enumerate(gradients, start=1):
        size += gradient.size
        if size >= limit or number == len(gradients):
            start = max(gradient.share * backward, end)
            end = start + all_reduce(size, gpus, cluster)
            yield Transfer(start, end)
            size = 0.0
            limit = buckets.size


def _when_free(
    gradients: list[Gradient], buckets: Buckets, backward: float, gpus: int, cluster: Cluster
) -> Iterator[Transfer]:
    end = 0.0
    sent = 0
    while sent < len(gradients):
        start = max(gradients[sent].share * backward, end)
        size = gradients[sent].size  # a gradient that is larger than a bucket is sent alone
        sent += 1
        for gradient in gradients[sent:]:
            is_there = gradient.share * backward <= start
            if not is_there or size + gradient.size > buckets.size:
                break
            size += gradient.size
            sent += 1
        end = start + all_reduce(size, gpus, cluster)
        yield Transfer(start, end)


def expected_maximum(count: int) -> float:
    """The expected distance of the largest of `count` normal samples from their mean, in standard deviations.

    Source: Blom's approximation, with the normal quantile of Abramowitz and Stegun, 26.2.23 (within 0.00045). The page
    computes it in the same way.
    """
    if count == 1:
        return 0.0
    above = 1 - (count - 0.375) / (count + 0.25)
    t = math.sqrt(-2 * math.log(above))
    numerator = 2.515517 + t * (0.802853 + t * 0.010328)
    denominator = 1 + t * (1.432788 + t * (0.189269 + t * 0.001308))
    return t - numerator / denominator
