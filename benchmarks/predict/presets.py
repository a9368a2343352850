"""Links, GPUs and effects with the figures that others have published for them. Nothing here is fitted to a result.

Sources:

- NCCL, src/graph/topo.h: bandwidth of links in GB/s (SM60_NVLINK_BW to SM100_NVLINK_BW, PCI_BW, NET_BW).
- NCCL, src/graph/tuning.cc, version 2.8: latencies of a ring's messages in µs (hwLat, baseLat; protocol Simple).
- TensorFlow, guide "Benchmarks", May 2017: images per second of one P100 on ResNet-50 with batch 64.
- NVIDIA, DeepLearningExamples, PyTorch ResNet50 v1.5: images per second of one V100 and of one A100 of 80 GB.
- NVIDIA, datasheets "A100 80GB" (2021), "H100" (2023), "H200" (2024) and "HGX B200" (2025), all for SXM: dense peaks,
  which are half of those with sparsity that the newer ones print, and size and bandwidth of memory. The size also of
  "Tesla P100" (2016) and "V100" (2020), each with the largest memory that it was sold with.
- Sinha et al., "Not All GPUs Are Created Equal", SC 2022: GPUs of one kind in one cluster differ by 8 % on average
  and by 22 % at most in how fast they are.
- Lee et al., arXiv 2507.03114, 2025: compute is 18.9 % slower on average, and 40 % at most, while the same GPU
  communicates.

Assumptions, each with the range that it leaves:

- An operator takes 10 µs to start from Python (5 to 20).
- Backward is two thirds of a step (0.6 to 0.7): it computes two products where forward computes one.
- Sinha's 8 % lies between the whiskers of a box plot, which are 5.4 standard deviations apart for normal samples. That
  makes 1.5 % (none to 4.1 %, which is 22 %).
- A network takes as much longer than ResNet-50 as it has more multiply-adds, or as its operators read and write more
  bytes, whichever is longer; the other of the two is the other end. Published rates on one GPU: ResNet-101 and VGG-16
  (P100, see `published`) lie between the two. Inception V3 (P100) and EfficientNet-B0 (A100 with TF32, 1078 images/s,
  NVIDIA, DeepLearningExamples, PyTorch EfficientNet) take 17 % longer than both.
- An H100, H200 or B200 is as much faster than an A100, for which a rate of PyTorch's ResNet-50 is published, as its
  memory is. The other end is the ratio of the dense peaks. In MLPerf Training 3.0 Dell trained ResNet-50 on 16 H100
  in 7.8 minutes and on 16 A100 in 14.4: a factor of 1.85, between 1.64 and 3.17.
- A gradient is there when the multiply-adds of backward up to its own are done.
- NCCL's messages of protocol LL wait 2.7 µs in place of 9.6, and a long ring's large ones 1.9 times as long.
"""

from typing import NamedTuple

from benchmarks.predict.model import Link, Network, Setup
from benchmarks.predict.networks import networks

GIGABYTE = 1e9
WHISKERS = 5.4  # standard deviations between the whiskers of a box plot of normal samples
SPEED_SPREAD = 0.08 / WHISKERS
CONTENTION = 0.189
BACKWARD_SHARE = 2 / 3
LAUNCH = 10e-6
START = 8.4e-6
NVLINK_LATENCY = 3.4e-6
PCIE_LATENCY = 5.7e-6
NETWORK_LATENCY = 9.6e-6

# The two ends of what nobody has published, as factors of a Setup's numbers. With the kind one the least time is lost.
KIND = {"speed_spread": 0.0, "contention": 0.0, "backward_share": 0.7 / BACKWARD_SHARE, "latency": 2.7 / 9.6}
HARSH = {
    "speed_spread": 0.22 / 0.08,
    "contention": 0.40 / CONTENTION,
    "backward_share": 0.6 / BACKWARD_SHARE,
    "latency": 1.9,
}
KIND_LAUNCH = 0.5
HARSH_LAUNCH = 2.0
LONGER_THAN_BOTH = 1.17  # of Inception V3 on a P100: what it takes over the longer one of two estimates


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        resnet50_per_second: what one alone trains of ResNet-50, which is published or derived from another's.
        gib: of its memory.
        is_mixed: whether the rate is one in mixed precision.
        fastest: the other end of a derived rate, as a factor of it.
    """

    name: str
    resnet50_per_second: float
    gib: int
    is_mixed: bool = False
    fastest: float = 1.0


GPUS = {
    "p100": Gpu("P100, float32", 219, 16),
    "v100": Gpu("V100, float32", 367, 32),
    "a100": Gpu("A100, TF32", 938, 80),
    "a100-amp": Gpu("A100, mixed precision", 2470, 80, is_mixed=True),
}
# GiB and GB/s of the memory, and the dense peaks with TF32 and bf16, the latter three as multiples of an A100's.
NEWER = {
    "h100": (80, 3350 / 2039, 494.7 / 156, 989.4 / 312),
    "h200": (141, 4800 / 2039, 494.7 / 156, 989.4 / 312),
    "b200": (180, 8000 / 2039, 1100 / 156, 2250 / 312),
}
for key, (gib, faster, tf32, bf16) in NEWER.items():
    GPUS[key] = Gpu(f"{key.upper()}, TF32", 938 * faster, gib, fastest=tf32 / faster)
    mixed = Gpu(f"{key.upper()}, mixed precision", 2470 * faster, gib, is_mixed=True, fastest=bf16 / faster)
    GPUS[f"{key}-amp"] = mixed
# NCCL: links of a GPU times the bandwidth of each; for the A100 the most that tuning.cc expects of an all-reduce.
INNER = {
    "nvlink-p100": Link(NVLINK_LATENCY, 4 * 18 * GIGABYTE),
    "nvlink-v100": Link(NVLINK_LATENCY, 6 * 20 * GIGABYTE),
    "nvlink-a100": Link(NVLINK_LATENCY, 235 * GIGABYTE),
    "nvlink-h100": Link(NVLINK_LATENCY, 18 * 20.6 * GIGABYTE),  # and the H200's
    "nvlink-b200": Link(NVLINK_LATENCY, 18 * 40.1 * GIGABYTE),
    "pcie3": Link(PCIE_LATENCY, 12 * GIGABYTE),
    "pcie4": Link(PCIE_LATENCY, 24 * GIGABYTE),
}


GIGABITS_TO_BANDWIDTH = 12 / 100 * GIGABYTE  # NCCL expects 12 GB/s of 100 Gbit/s


def ethernet(gigabits: float, cards: int = 1) -> Link:
    """The network of a node with so many cards of so many Gbit/s."""
    return Link(NETWORK_LATENCY, cards * gigabits * GIGABITS_TO_BANDWIDTH)


NETWORK = {
    "25g": ethernet(25),
    "100g": ethernet(100),
    "200g": ethernet(200),
    "400g": ethernet(400),
    "8x200g": ethernet(200, cards=8),
    "8x400g": ethernet(400, cards=8),
}

NODE_SIZES = (1, 2, 4, 8)  # GPUs


class Hardware(NamedTuple):
    """The hardware that a prediction is for, by the names above."""

    gpu: str = "a100"
    inner: str = "nvlink-a100"
    network: str = "8x200g"
    gpus_per_node: int = 8


class Estimates(NamedTuple):
    """How much longer a network computes than ResNet-50 on the same GPU, by each of two of its counts."""

    by_operations: float
    by_bytes: float


def estimates(network: Network) -> Estimates:
    reference = networks()["ResNet-50"]
    return Estimates(
        by_operations=network.multiply_adds / reference.multiply_adds,
        by_bytes=network.bytes_of_a_sample / reference.bytes_of_a_sample,
    )


def sample_seconds(network: Network, gpu: Gpu) -> float:
    """Seconds that one GPU computes for one sample of a step, after its published rate for ResNet-50."""
    return max(estimates(network)) / gpu.resnet50_per_second


def compute_range(network: Network, gpu: Gpu) -> tuple[float, float]:
    """The kind and the harsh end of `sample_seconds`, as factors of it."""
    both = estimates(network)
    is_resnet50 = network.gradients == networks()["ResNet-50"].gradients
    return min(both) / max(both) / gpu.fastest, 1.0 if is_resnet50 else LONGER_THAN_BOTH


def setup(network: Network, hardware: Hardware, batch: float) -> Setup:
    """A network on the hardware under DDP, with the effects at their published averages."""
    return Setup(
        network,
        batch,
        sample_seconds=sample_seconds(network, GPUS[hardware.gpu]),
        launch_seconds=LAUNCH,
        gpus_per_node=hardware.gpus_per_node,
        inner=INNER[hardware.inner],
        between=NETWORK[hardware.network],
        start=START,
        backward_share=BACKWARD_SHARE,
        speed_spread=SPEED_SPREAD,
        contention=CONTENTION,
    )
