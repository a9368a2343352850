"""The time of a step of data-parallel training: compute, and the part of the all-reduces that backward does not hide.

    step = forward + max(backward, end of the last all-reduce) + what is left of the step

An all-reduce costs a latency for each message, however small it is, and the bytes over the bandwidth. Each of W GPUs
sends 2 (W − 1) / W of the bytes. In a tree they take 2 log2 W messages, one after another: up to the root and down
again. Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005.

Three effects are in it besides the all-reduce itself, each with a published size (see `presets`):

- A step is launch-bound where starting its kernels takes longer than running them.
- All GPUs wait for the slowest of them. Their speeds differ, though they are of one kind.
- Backward is slower while an all-reduce runs beside it on the same GPU.

The second and the third make kernels slower. A launch-bound step hides them as long as its kernels still end in time.
Not in it is the optimizer's update, beyond its part in the published step from which a time is scaled: some 0.1 % of
ResNet-50's, and more of a network that is mostly tables.

model.js is the same model once more, for the page. A test holds both against each other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

GRADIENT_BYTES = 4  # float32


class Link(NamedTuple):
    """A way for messages.

    Attributes:
        latency: seconds for one message, however small it is.
        bandwidth: bytes per second in each direction, at the same time.
    """

    latency: float
    bandwidth: float


class Gradient(NamedTuple):
    """A parameter tensor's numbers, and the multiply-adds that backward has done when its gradient is there."""

    parameters: int
    done: int


@dataclass(frozen=True)
class Network:
    """A network, as far as a prediction knows it.

    Attributes:
        gradients: in the order in which backward computes them.
        multiply_adds: of the forward of one sample.
        operators: how many one training step runs.
        bytes_of_a_sample: by how many bytes more these operators read and write for each sample of the batch.
    """

    name: str
    gradients: tuple[Gradient, ...]
    multiply_adds: int
    operators: int
    bytes_of_a_sample: int

    @property
    def parameters(self) -> int:
        return sum(gradient.parameters for gradient in self.gradients)


@dataclass(frozen=True)
class Setup:
    """All that the time of a step follows from but the number of GPUs.

    Attributes:
        batch: samples for each GPU.
        sample_seconds: seconds that one GPU computes for one sample of a step, where launches do not bound it.
        launch_seconds: seconds to start one operator from Python.
        gpus_per_node: GPUs of one node, which share its link to the other nodes.
        inner: the link of one GPU to the others of its node.
        between: the link of one whole node to the other nodes.
        start: seconds to start one all-reduce, whatever it sends.
        backward_share: the part of the step that backward takes.
        bucket: bytes of gradients at which they are sent.
        first_bucket: the same for those that are sent first.
        speed_spread: standard deviation of the GPUs' times for the same work, as a share of it.
        contention: by which share backward is slower while an all-reduce runs.
    """

    network: Network
    batch: float
    sample_seconds: float
    launch_seconds: float
    gpus_per_node: int
    inner: Link
    between: Link
    start: float = 0.0
    backward_share: float = 2 / 3
    bucket: float = 25 * 2**20  # DDP's, as is the first one
    first_bucket: float = 2**20
    speed_spread: float = 0.0
    contention: float = 0.0

    @property
    def kernels(self) -> float:
        """Seconds that the kernels of a step run on one GPU."""
        return self.batch * self.sample_seconds

    @property
    def launches(self) -> float:
        """Seconds that the CPU needs to start the kernels of a step, however small it is."""
        return self.network.operators * self.launch_seconds

    @property
    def compute(self) -> float:
        """Seconds of a step on one GPU alone."""
        return max(self.kernels, self.launches)


class Transfer(NamedTuple):
    """One all-reduce: seconds since backward began."""

    start: float
    end: float


def all_reduce(setup: Setup, size: float, gpus: int) -> float:
    """Seconds to sum `size` bytes over `gpus` GPUs, which fill whole nodes or a part of one."""
    if gpus == 1:
        return 0.0
    nodes = max(1, gpus // setup.gpus_per_node)
    within = levels(gpus // nodes) * setup.inner.latency
    across = levels(nodes) * setup.between.latency
    if nodes == 1:
        bandwidth = setup.inner.bandwidth
    elif nodes == gpus:
        bandwidth = setup.between.bandwidth
    else:
        bandwidth = min(setup.inner.bandwidth, setup.between.bandwidth)
    sent = 2 * (gpus - 1) / gpus * size
    return setup.start + 2 * (within + across) + sent / bandwidth


def levels(members: int) -> int:
    """The binary logarithm, rounded up."""
    return (members - 1).bit_length()


def transfers(setup: Setup, backward: float, gpus: int) -> Iterator[Transfer]:
    """The all-reduces of a step whose backward takes `backward` seconds, in order; there is at least one.

    This is DDP's rule: a bucket is sent when it is full, if the one before has arrived.
    """
    gradients = setup.network.gradients
    end = 0.0
    size = 0.0
    limit = setup.first_bucket
    for gradient in gradients:
        size += gradient.parameters * GRADIENT_BYTES
        if size >= limit or gradient is gradients[-1]:
            is_there = backward * gradient.done / gradients[-1].done
            start = max(is_there, end)
            end = start + all_reduce(setup, size, gpus)
            yield Transfer(start, end)
            size = 0.0
            limit = setup.bucket


def step(setup: Setup, gpus: int) -> float:
    """Seconds of a step on `gpus` GPUs."""
    if gpus == 1:
        return setup.compute
    kernels = setup.kernels * (1 + setup.speed_spread * expected_maximum(gpus))
    compute = max(kernels, setup.launches)
    backward = compute * setup.backward_share
    # How far backward is slowed down follows from the transfers beside a backward that is not.
    hidden = 0.0
    for transfer in transfers(setup, backward, gpus):
        hidden += min(transfer.end, backward) - min(transfer.start, backward)
    # A launch-bound GPU is idle between its kernels, so only a part of that time is a kernel's.
    hidden_kernels = hidden * kernels / compute
    slowed_kernels = kernels * setup.backward_share + setup.contention * hidden_kernels
    slowed = max(slowed_kernels, backward)
    *_, last = transfers(setup, slowed, gpus)
    return compute - backward + max(slowed, last.end)


def speed_up(setup: Setup, global_batch: float, gpus: int) -> float:
    """How many times faster `gpus` GPUs take a step of `global_batch` samples than one does."""
    alone = replace(setup, batch=global_batch).compute
    return alone / step(replace(setup, batch=global_batch / gpus), gpus)


def pays_from(setup: Setup, gpus: int, efficiency: float, most: int = 2**24) -> int | None:
    """The smallest global batch, a power of two, on which the speed-up is more than `efficiency` · `gpus`.

    It is None if there is none up to `most` samples. An efficiency of 1 / `gpus` asks where they are faster than one.
    """
    global_batch = gpus
    while global_batch <= most:
        if speed_up(setup, global_batch, gpus) > efficiency * gpus:
            return global_batch
        global_batch *= 2
    return None


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
