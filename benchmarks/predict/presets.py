"""Links, GPUs and effects with the figures that others have published for them. Nothing here is fitted to a result.

Sources:

- NCCL, src/graph/topo.h: bandwidth of links in GB/s (SM60_NVLINK_BW to SM100_NVLINK_BW, PCI_BW, NET_BW).
- NCCL, src/graph/tuning.cc, version 2.8: latencies of a ring's messages in µs (hwLat, baseLat; protocol Simple).
- TensorFlow, guide "Benchmarks", May 2017: images per second of one P100 on ResNet-50 with batch 64.
- NVIDIA, DeepLearningExamples, PyTorch ResNet50 v1.5: images per second of one V100 and of one A100 of 80 GB.
- NVIDIA, datasheets "A100 80GB" (2021), "H100" (2023), "H200" (2024) and "HGX B200" (2025), all for SXM: the bandwidth
  of memory.
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
  (P100, see the cases of PREDICTION.md) lie between the two. Inception V3 (P100) and EfficientNet-B0 (A100 with TF32,
  1078 images/s, NVIDIA, DeepLearningExamples, PyTorch EfficientNet) take 17 % longer than both.
- An H100, H200 or B200 is as much faster than an A100, for which a rate of PyTorch's ResNet-50 is published, as its
  memory is: an H100 by a factor of 1.64. In MLPerf Training 3.0 Dell trained ResNet-50 on 16 H100 in 7.8 minutes and
  on 16 A100 in 14.4, which is a factor of 1.85.
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


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        resnet50_per_second: what one alone trains of ResNet-50, which is published or derived from another's.
    """

    name: str
    resnet50_per_second: float


GPUS = {
    "p100": Gpu("P100, float32", 219),
    "v100": Gpu("V100, float32", 367),
    "a100": Gpu("A100, TF32", 938),
    "a100-amp": Gpu("A100, mixed precision", 2470),
}
# GB/s of the memory, as multiples of an A100's.
NEWER = {"h100": 3350 / 2039, "h200": 4800 / 2039, "b200": 8000 / 2039}
for key, faster in NEWER.items():
    GPUS[key] = Gpu(f"{key.upper()}, TF32", 938 * faster)
    GPUS[f"{key}-amp"] = Gpu(f"{key.upper()}, mixed precision", 2470 * faster)
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


def estimates(network: Network) -> tuple[float, float]:
    """How much longer a network computes than ResNet-50 on the same GPU, by its operations and by its bytes."""
    reference = networks()["ResNet-50"]
    by_operations = network.multiply_adds / reference.multiply_adds
    by_bytes = network.bytes_of_a_sample / reference.bytes_of_a_sample
    return by_operations, by_bytes


def sample_seconds(network: Network, gpu: Gpu) -> float:
    """Seconds that one GPU computes for one sample of a step, after its published rate for ResNet-50."""
    return max(estimates(network)) / gpu.resnet50_per_second


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
