"""The time of a step of data-parallel training: compute, and the part of the all-reduces that backward does not hide.

    step = forward + max(backward, end of the last all-reduce) + what is left of the step

Beside the time of each `all_reduce` three effects are in the model:

- launches: a step with little to compute is launch-bound, that is, the GPU waits for the CPU to start its kernels.
- the slowest GPU: all wait for it, and the more GPUs there are, the slower it is.
- contention: an all-reduce slows the kernels that run beside it.

A launch-bound step hides the last two. The optimizer's update is left out, except for its part in the published step
from which a time is scaled. It takes some 0.1 % of ResNet-50's step, and more of a network's that is mostly tables.
benchmarks/PREDICTION.md compares the model with published measurements.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from benchmarks.your_network.all_reduce import Cluster, seconds_of_all_reduce
from benchmarks.your_network.count import Gradient

GRADIENT_BYTES = 4  # float32
PAYING_EFFICIENCY = 0.9  # GPUs pay if their scaling efficiency is more than this.
LARGEST_GLOBAL_BATCH = 2**20


class Bucket(NamedTuple):
    """Gradients that one all-reduce sends."""

    size: int  # bytes
    ready: float  # the part of backward that is done when the last of them is there


@dataclass(frozen=True)
class Setup:
    """All that the time of a step follows from but the batch and the number of GPUs.

    Attributes:
        buckets: in the order in which they are sent.
        sample_seconds: seconds that one GPU computes for one sample of a step, where launches do not bound it.
        launch_seconds: seconds that the CPU needs to start the kernels of a step, however small it is.
        cluster: the GPUs' links.
        backward_share: the part of a step that backward takes. It is assumed, because backward computes two products
            where forward computes one.
        speed_spread: standard deviation of the GPUs' times for the same work, as a share of it. GPUs of one kind differ
            by 8 % on average (Sinha et al., Not All GPUs Are Created Equal, SC 2022). That is between the whiskers of a
            box plot, which are 5.4 standard deviations apart for normal samples.
        contention: by which share backward is slower while an all-reduce runs: 18.9 % on average (Lee et al., arXiv
            2507.03114, 2025).
    """

    buckets: tuple[Bucket, ...]
    sample_seconds: float
    launch_seconds: float
    cluster: Cluster
    backward_share: float = 2 / 3
    speed_spread: float = 0.08 / 5.4
    contention: float = 0.189


class Transfer(NamedTuple):
    """One all-reduce: seconds since backward began."""

    start: float
    end: float


def fill_buckets(gradients: tuple[Gradient, ...], first: int = 2**20, others: int = 25 * 2**20) -> tuple[Bucket, ...]:
    """The gradients in buckets, each of which is sent when it has so many bytes. The defaults are DDP's."""
    last = gradients[-1]
    buckets = []
    size = 0
    limit = first
    for gradient in gradients:
        size += gradient.parameters * GRADIENT_BYTES
        if size >= limit or gradient is last:
            # If backward multiplies nothing that is counted, the gradients are taken to come at its end.
            ready = gradient.done / last.done if last.done else 1.0
            buckets.append(Bucket(size, ready))
            size = 0
            limit = others
    return tuple(buckets)


def transfers(setup: Setup, backward: float, gpus: int) -> list[Transfer]:
    """The all-reduces of a step whose backward takes `backward` seconds.

    This is DDP's rule: a bucket is sent when it is full, if the one before has arrived.
    """
    found = []
    end = 0.0
    for bucket in setup.buckets:
        start = max(backward * bucket.ready, end)
        end = start + seconds_of_all_reduce(setup.cluster, bucket.size, gpus)
        found.append(Transfer(start, end))
    return found


def predicted_seconds(setup: Setup, batch: float, gpus: int) -> float:
    """Seconds of a step on `gpus` GPUs with a `batch` on each.

    For example, (1) compute takes 30 ms, of which backward is 20 ms. Two buckets are ready at its middle and its end,
    and take 10 ms each. (2) They are sent from 10 to 20 ms and from 20 to 30 ms after backward began: 10 ms lie within
    backward. (3) With a contention of 20 %, backward takes 2 ms more: 22 ms. (4) Now the buckets are sent from 11 to
    21 ms and from 22 to 32 ms, so the step takes 10 + 32 = 42 ms.
    """
    # 1. Compute: all wait for the slowest GPU, and no step is shorter than its launches.
    slowest = 1 + setup.speed_spread * expected_maximum(gpus)
    kernels = slowest * batch * setup.sample_seconds
    compute = max(kernels, setup.launch_seconds)
    if gpus == 1:
        return compute
    # 2. Seconds of backward during which an all-reduce runs, first timed without the slowdown it causes. One correction
    # follows and is not repeated.
    backward = compute * setup.backward_share
    overlapped = 0.0
    for transfer in transfers(setup, backward, gpus):
        overlapped += min(transfer.end, backward) - min(transfer.start, backward)
    # 3. The correction. A launch-bound GPU is idle between kernels, so only a part of those seconds is slowed down.
    overlapped_kernels = overlapped * kernels / compute
    slowed_kernels = kernels * setup.backward_share + setup.contention * overlapped_kernels
    slowed_backward = max(slowed_kernels, backward)
    # 4. The end of the last all-reduce, timed again with the slower backward.
    last = transfers(setup, slowed_backward, gpus)[-1]
    return compute - backward + max(slowed_backward, last.end)


def expected_maximum(count: int) -> float:
    """The expected distance of the largest of `count` normal samples from their mean, in standard deviations.

    Source: Blom, Statistical Estimates and Transformed Beta-Variables, 1958.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def scaling_efficiency(setup: Setup, global_batch: int, gpus: int) -> float:
    """The speed-up of `gpus` GPUs over one, for a step of `global_batch` samples, as a share of their number."""
    alone = predicted_seconds(setup, global_batch, 1)
    together = predicted_seconds(setup, global_batch / gpus, gpus)
    return alone / together / gpus


def pays_from(setup: Setup, gpus: int) -> int | None:
    """The smallest global batch whose scaling efficiency is more than PAYING_EFFICIENCY, or None if there is none.

    The candidates are gpus, 2 gpus, 4 gpus, … up to LARGEST_GLOBAL_BATCH.
    """
    global_batch = gpus
    while global_batch <= LARGEST_GLOBAL_BATCH:
        if scaling_efficiency(setup, global_batch, gpus) > PAYING_EFFICIENCY:
            return global_batch
        global_batch *= 2
    return None
