"""The time of an all-reduce: a latency for each message, however small it is, and the bytes over the bandwidth.

Each of W GPUs sends 2 (W − 1) / W of the bytes, in 2 log2 W messages one after another: log2 W to add up ever smaller
parts (halving), and log2 W to collect the sums (doubling). Source: Thakur, Rabenseifner and Gropp, Optimization of
Collective Communication Operations in MPICH, 2005.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Fixed seconds of every all-reduce. Source: NCCL 2.8, src/graph/tuning.cc, baseLat.
START_SECONDS = 8.4e-6


class Link(NamedTuple):
    latency: float  # seconds for one message, however small it is
    bandwidth: float  # bytes per second in each direction, at the same time


@dataclass(frozen=True)
class Cluster:
    """The links of GPUs in nodes."""

    gpus_per_node: int
    inner: Link  # of one GPU to the others of its node
    between: Link  # of one whole node, whose GPUs share it, to the other nodes


def seconds_of_all_reduce(cluster: Cluster, size: int, gpus: int) -> float:
    """Seconds to sum `size` bytes over two or more GPUs, which fill whole nodes or a part of one."""
    nodes = max(1, gpus // cluster.gpus_per_node)
    gpus_of_a_node = gpus // nodes
    latency = 0.0
    bandwidths = []
    for members, link in ((gpus_of_a_node, cluster.inner), (nodes, cluster.between)):
        if members > 1:
            halvings = (members - 1).bit_length()
            latency += 2 * halvings * link.latency
            bandwidths.append(link.bandwidth)
    sent = 2 * (gpus - 1) / gpus * size
    return START_SECONDS + latency + sent / min(bandwidths)
