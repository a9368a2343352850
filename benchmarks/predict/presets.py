"""Links, GPUs and effects with the figures that others have published for them. Nothing here is fitted to a result.

Sources:

- NCCL, src/graph/topo.h: bandwidth of links in GB/s (SM60_NVLINK_BW to SM100_NVLINK_BW, PCI_BW, NET_BW).
- NCCL, src/graph/tuning.cc, version 2.8: latencies of a ring's messages in µs (hwLat, baseLat; protocol Simple).
- TensorFlow, guide "Benchmarks", May 2017: images per second of one P100 on ResNet-50 with batch 64.
- NVIDIA, DeepLearningExamples, PyTorch ResNet50 v1.5: images per second of one V100 and of one A100 of 80 GB.
- NVIDIA, datasheets "A100 80GB" (2021), "H100" (2023), "H200" (2024) and "HGX B200" (2025), all for SXM: dense peaks,
  which are half of those with sparsity that the newer ones print, and size and bandwidth of memory. The latter also of
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
- A gradient is there when its layer's share of the multiply-adds of backward is done.
"""

from typing import NamedTuple

from benchmarks.predict.all_reduce import Cluster, Link
from benchmarks.predict.networks import networks
from benchmarks.predict.step import Network, Workload

MICROSECOND = 1e-6
GIGABYTE = 1e9
WHISKERS = 5.4  # standard deviations between the whiskers of a box plot of normal samples
SPEED_SPREAD = 0.08 / WHISKERS
LARGEST_SPEED_SPREAD = 0.22 / WHISKERS
CONTENTION = 0.189
LARGEST_CONTENTION = 0.40
LAUNCH = 10 * MICROSECOND
START = 8.4 * MICROSECOND
NVLINK_LATENCY = 3.4 * MICROSECOND
PCIE_LATENCY = 5.7 * MICROSECOND
NETWORK_LATENCY = 9.6 * MICROSECOND


class Gpu(NamedTuple):
    """A kind of GPU by what one alone trains of ResNet-50 in a second, which is published or derived from another's.

    `fastest` is the other end of a derived rate, as a factor of it.
    """

    name: str
    resnet50_per_second: float
    fastest: float = 1.0


class Memory(NamedTuple):
    """The memory of a GPU: gibibytes, and gigabytes per second at its peak."""

    gib: int
    bandwidth: float


class Peaks(NamedTuple):
    """The dense peaks of a GPU, in teraflops."""

    tf32: float
    bf16: float


MEMORY = {
    "p100": Memory(16, 732),
    "v100": Memory(32, 900),
    "a100": Memory(80, 2039),
    "h100": Memory(80, 3350),
    "h200": Memory(141, 4800),
    "b200": Memory(180, 8000),
}
A100 = Peaks(156, 312)
NEWER = {"h100": Peaks(494.7, 989.4), "h200": Peaks(494.7, 989.4), "b200": Peaks(1100, 2250)}
GPUS = {
    "p100": Gpu("P100, float32", 219),
    "v100": Gpu("V100, float32", 367),
    "a100": Gpu("A100, TF32", 938),
    "a100-amp": Gpu("A100, mixed precision", 2470),
}
for key, peaks in NEWER.items():
    faster = MEMORY[key].bandwidth / MEMORY["a100"].bandwidth
    GPUS[key] = Gpu(f"{key.upper()}, TF32", 938 * faster, peaks.tf32 / A100.tf32 / faster)
    GPUS[f"{key}-amp"] = Gpu(f"{key.upper()}, mixed precision", 2470 * faster, peaks.bf16 / A100.bf16 / faster)
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

    @property
    def is_mixed(self) -> bool:
        """True where the GPU's rate is one in mixed precision."""
        return self.gpu.endswith("-amp")

    @property
    def memory(self) -> Memory:
        """Of one GPU."""
        return MEMORY[self.gpu.removesuffix("-amp")]


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


def training(network: Network, gpu: Gpu) -> Workload:
    """A network on a kind of GPU under DDP, with the effects at their published averages."""
    return Workload(
        network,
        sample_seconds(network, gpu),
        LAUNCH,
        speed_spread=SPEED_SPREAD,
        contention=CONTENTION,
    )


def cluster(inner: str, network: str, gpus_per_node: int) -> Cluster:
    """Nodes with one of INNER's links and one of NETWORK's. KeyError is raised for another name."""
    return Cluster(gpus_per_node, INNER[inner], NETWORK[network], start=START)
