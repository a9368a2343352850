"""GPUs and links with published figures, or figures scaled from these. None is chosen to make predictions agree."""

from typing import NamedTuple

from benchmarks.your_network.all_reduce import Link

# Latencies and bandwidths are NCCL's: src/graph/tuning.cc of version 2.8 (hwLat of a ring, protocol Simple), and
# src/graph/topo.h (SM60_NVLINK_BW to SM100_NVLINK_BW, PCI_BW, NET_BW).
GIGABYTE = 1e9
GIGABIT = 12 / 100 * GIGABYTE  # NCCL expects 12 GB/s of 100 Gbit/s


def nvlink(gigabytes: float) -> Link:
    return Link(latency=3.4e-6, bandwidth=gigabytes * GIGABYTE)


def pcie(gigabytes: float) -> Link:
    return Link(latency=5.7e-6, bandwidth=gigabytes * GIGABYTE)


def ethernet(gigabits: float) -> Link:
    return Link(latency=9.6e-6, bandwidth=gigabits * GIGABIT)


class Gpu(NamedTuple):
    """A kind of GPU: the images of ResNet-50 that one alone trains in a second, and all its NVLinks together."""

    name: str
    resnet50_per_second: float
    nvlink: Link


NVLINK_A100 = nvlink(235)  # what tuning.cc expects of an all-reduce
NVLINK_H100 = nvlink(18 * 20.6)  # links of a GPU times the bandwidth of each; the H200 has the same
NVLINK_B200 = nvlink(18 * 40.1)
# Images per second, like the 367 of the V100: NVIDIA, DeepLearningExamples, PyTorch ResNet50 v1.5.
A100 = 938
A100_AMP = 2470
# PyTorch's rates on newer GPUs are not published. They are taken to be as many times those of the A100 as the memory is
# faster, in GB/s. Sources: NVIDIA's datasheets "A100 80GB" (2021), "H100" (2023), "H200" (2024) and "HGX B200" (2025),
# all for SXM.
H100_TIMES_A100 = 3350 / 2039
H200_TIMES_A100 = 4800 / 2039
B200_TIMES_A100 = 8000 / 2039

GPUS = {
    "v100": Gpu("V100, float32", 367, nvlink(6 * 20)),
    "a100": Gpu("A100, TF32", A100, NVLINK_A100),
    "a100-amp": Gpu("A100, mixed precision", A100_AMP, NVLINK_A100),
    "h100": Gpu("H100, TF32 (scaled from A100)", H100_TIMES_A100 * A100, NVLINK_H100),
    "h100-amp": Gpu("H100, mixed precision (scaled from A100)", H100_TIMES_A100 * A100_AMP, NVLINK_H100),
    "h200": Gpu("H200, TF32 (scaled from A100)", H200_TIMES_A100 * A100, NVLINK_H100),
    "h200-amp": Gpu("H200, mixed precision (scaled from A100)", H200_TIMES_A100 * A100_AMP, NVLINK_H100),
    "b200": Gpu("B200, TF32 (scaled from A100)", B200_TIMES_A100 * A100, NVLINK_B200),
    "b200-amp": Gpu("B200, mixed precision (scaled from A100)", B200_TIMES_A100 * A100_AMP, NVLINK_B200),
}

PCIE = {"pcie3": pcie(12), "pcie4": pcie(24)}  # with 16 lanes
INNER = (*PCIE, "nvlink")
NETWORK = {
    "25g": ethernet(25),
    "100g": ethernet(100),
    "200g": ethernet(200),
    "400g": ethernet(400),
    "8x200g": ethernet(8 * 200),
    "8x400g": ethernet(8 * 400),
}

LAUNCH_SECONDS = 10e-6  # assumed: the time to start an operator from Python
# The costs of torchvision's ResNet-50, as `count` finds them.
RESNET50_MULTIPLY_ADDS = 4_089_184_256
RESNET50_BYTES_OF_A_SAMPLE = 780_116_880
