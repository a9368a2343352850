"""The cost of an all-reduce: a latency for each message (alpha), and the bytes over the bandwidth (beta).

A ring of W GPUs sends 2 (W − 1) messages one after another, and each GPU sends 2 (W − 1) / W of the bytes:

    2 (W − 1) · latency + 2 (W − 1) / W · bytes / bandwidth

Recursive halving and doubling moves as many bytes in 2 log2 W messages; here it is called a tree, because the double
binary trees of NCCL cost nearly the same. Source: Thakur, Rabenseifner and Gropp, Optimization of Collective
Communication Operations in MPICH, IJHPCA 2005.
"""

from dataclasses import dataclass
from typing import NamedTuple

RING = "ring"
TREE = "tree"
TWO_RINGS = "two rings"
RING_AND_TREE = "ring and tree"
FASTEST = "fastest"


class Link(NamedTuple):
    """A way for messages.

    Attributes:
        latency: seconds for one message, however small it is.
        bandwidth: bytes per second in each direction, at the same time.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, and how they all-reduce.

    Attributes:
        gpus_per_node: GPUs of one node.
        inner: the link of one GPU to the others of its node.
        network: the link of one whole node to the other nodes, which its GPUs share.
        algorithm: RING: one ring through all GPUs, node by node. TREE: one tree through all GPUs. TWO_RINGS: a ring in
            each node gives every GPU the sum of one part, the GPUs with the same part make a ring between the nodes,
            and a ring in each node hands the parts round. RING_AND_TREE: the same with trees between the nodes.
            FASTEST: whichever takes the least time for this size, which is how NCCL chooses.
        start: seconds to start one all-reduce, whatever it sends.
    """

    gpus_per_node: int
    inner: Link
    network: Link
    algorithm: str = FASTEST
    start: float = 0.0


def all_reduce(size: float, gpus: int, cluster: Cluster) -> float:
    """Seconds to sum `size` bytes over `gpus` GPUs, which fill whole nodes or a part of one.

    Raises:
        ValueError: if the GPUs fill neither whole nodes nor a part of one.
    """
    if gpus == 1:
        return 0.0
    if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {cluster.gpus_per_node}")
    if cluster.algorithm == FASTEST:
        return cluster.start + min(cost(size, gpus, cluster) for cost in COSTS.values())
    return cluster.start + COSTS[cluster.algorithm](size, gpus, cluster)


def _nodes(gpus: int, cluster: Cluster) -> int:
    return max(1, gpus // cluster.gpus_per_node)


def _bandwidth(gpus: int, cluster: Cluster) -> float:
    """Of the narrowest link that one ring through all GPUs passes."""
    nodes = _nodes(gpus, cluster)
    if nodes == 1:
        return cluster.inner.bandwidth
    if nodes == gpus:
        return cluster.network.bandwidth
    return min(cluster.inner.bandwidth, cluster.network.bandwidth)


def _volume(members: int) -> float:
    """The part of the bytes that each member of a ring or tree sends."""
    return 2 * (members - 1) / members


def _ring(size: float, gpus: int, cluster: Cluster) -> float:
    nodes = _nodes(gpus, cluster)
    # NCCL counts like this: 2 (nodes − 1) of the messages in a row pass the network.
    waited = 2 * (gpus - nodes) * cluster.inner.latency + 2 * (nodes - 1) * cluster.network.latency
    return waited + _volume(gpus) * size / _bandwidth(gpus, cluster)


def _tree(size: float, gpus: int, cluster: Cluster) -> float:
    nodes = _nodes(gpus, cluster)
    waited = _levels(gpus // nodes) * cluster.inner.latency + _levels(nodes) * cluster.network.latency
    return 2 * waited + _volume(gpus) * size / _bandwidth(gpus, cluster)


def _levels(members: int) -> int:
    """The binary logarithm, rounded up."""
    return (members - 1).bit_length()


def _within_nodes(size: float, gpus: int, cluster: Cluster) -> float:
    """Both halves of a ring in each node: the sums of parts before, and handing them round after."""
    members = gpus // _nodes(gpus, cluster)
    return 2 * (members - 1) * cluster.inner.latency + _volume(members) * size / cluster.inner.bandwidth


def _two_rings(size: float, gpus: int, cluster: Cluster) -> float:
    nodes = _nodes(gpus, cluster)
    waited = 2 * (nodes - 1) * cluster.network.latency
    return _within_nodes(size, gpus, cluster) + waited + _volume(nodes) * size / cluster.network.bandwidth


def _ring_and_tree(size: float, gpus: int, cluster: Cluster) -> float:
    nodes = _nodes(gpus, cluster)
    waited = 2 * _levels(nodes) * cluster.network.latency
    return _within_nodes(size, gpus, cluster) + waited + _volume(nodes) * size / cluster.network.bandwidth


COSTS = {RING: _ring, TREE: _tree, TWO_RINGS: _two_rings, RING_AND_TREE: _ring_and_tree}
