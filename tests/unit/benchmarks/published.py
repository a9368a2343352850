"""Predictions compared with measurements that others have published, and that nothing here was fitted to."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torchvision import models

from benchmarks.your_network.all_reduce import Cluster, Link
from benchmarks.your_network.count import NetworkCosts, count
from benchmarks.your_network.presets import GPUS, PCIE, ethernet, nvlink
from benchmarks.your_network.scaling import Bucket, Setup, fill_buckets, predicted_seconds
from benchmarks.your_network.user_network import UserNetwork
from common.model import BasicNet


def inception() -> models.Inception3:
    """Inception V3 without the auxiliary classifier, as tf_cnn_benchmarks trains it, which published figures use."""
    return models.inception_v3(aux_logits=False, init_weights=False)


NETWORKS = {
    "BasicNet": (BasicNet, (1, 28, 28), F.nll_loss),
    "VGG-16": (models.vgg16, (3, 224, 224), F.cross_entropy),
    "ResNet-50": (models.resnet50, (3, 224, 224), F.cross_entropy),
    "ResNet-101": (models.resnet101, (3, 224, 224), F.cross_entropy),
    "Inception V3": (inception, (3, 299, 299), F.cross_entropy),
}


@functools.cache
def costs_of(name: str) -> NetworkCosts:
    build, shape, loss = NETWORKS[name]

    def batch(samples: int):
        return torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.long)

    return count(UserNetwork(name, build, batch, loss, torch.optim.AdamW), batch=2)


NVLINK_P100 = nvlink(4 * 18)  # NCCL: links times the bandwidth of each


@dataclass(frozen=True)
class Case:
    """A published efficiency, and what is known of how it was measured.

    Attributes:
        efficiency: throughput on `gpus` GPUs as a share of `gpus` / `baseline` times that on `baseline` GPUs.
        batch: samples for each GPU.
        setup: what was trained, on which links.
        inputs_are_published: true where bytes, the step on one GPU and the links are.
    """

    name: str
    efficiency: float
    batch: int
    gpus: int
    setup: Setup
    baseline: int = 1
    inputs_are_published: bool = True

    @property
    def lost(self) -> float:
        """The predicted share of the throughput that is lost: 0.1 stands for an efficiency of 90 %."""
        few = predicted_seconds(self.setup, self.batch, self.baseline)
        return 1 - few / predicted_seconds(self.setup, self.batch, self.gpus)

    @property
    def off_by(self) -> float:
        """The factor between the predicted and the published loss, at least 1."""
        ratio = self.lost / (1 - self.efficiency)
        return max(ratio, 1 / ratio)


def training_on(buckets: tuple[Bucket, ...], rate: float, gpus_per_node: int, inner: Link, gigabits: float) -> Setup:
    """A network whose samples per second on one GPU are published; launches do not bound these steps."""
    cluster = Cluster(gpus_per_node, inner, between=ethernet(gigabits))
    return Setup(buckets, sample_seconds=1 / rate, launch_seconds=0.0, cluster=cluster)


def horovod() -> Iterator[Case]:
    """Sources: README.md of October 2017, first table (RDMA, NCCL), for 16 GPUs and the images/s of one at batch 64;
    docs/benchmarks.rst for 512. 4 Pascal GPUs a server on PCIe (issue 979), RoCE at 25 Gbit/s. It sends up to 64 MB at
    a time (docs/tensor-fusion.rst), which are taken for its bucket.
    """
    for name, alone, on_16, efficiency_on_512 in (
        ("Inception V3", 134.4, 2022.6, 0.90),
        ("ResNet-101", 119.4, 1746.2, 0.90),
        ("VGG-16", 130.9, 1787.4, 0.68),
    ):
        buckets = fill_buckets(costs_of(name).gradients, first=64 * 2**20, others=64 * 2**20)
        setup = training_on(buckets, alone, 4, PCIE["pcie3"], gigabits=25)
        for gpus, efficiency in ((16, on_16 / 16 / alone), (512, efficiency_on_512)):
            yield Case(f"Horovod, {name}, {gpus} GPUs", efficiency, 64, gpus, setup)


def goyal() -> Case:
    """Source: Goyal et al. 2017, arXiv 1706.02677, section 5.5 and figure 8. 8 P100 with NVLink a server, Ethernet at
    50 Gbit/s, backward 120 ms (section 4.3), gradients one by one, halving and doubling between servers (section 4.1).
    """
    # 352 GPUs take 1.28 million images in 30 s, 11,264 in a step, and their step is 12 % longer than that of 8.
    seconds = 30 / (1.28e6 / 11_264) / 1.12
    buckets = fill_buckets(costs_of("ResNet-50").gradients, first=0, others=0)
    setup = training_on(buckets, 32 / seconds, 8, NVLINK_P100, gigabits=50)
    setup = replace(setup, backward_share=0.120 / seconds)
    return Case("Goyal et al., ResNet-50, 8 to 256 GPUs", efficiency=0.90, batch=32, gpus=256, setup=setup, baseline=8)


def nvidia() -> Iterator[Case]:
    """Source: DeepLearningExamples, PyTorch ResNet50 v1.5. Data come from disk, which the model does not know."""
    buckets = fill_buckets(costs_of("ResNet-50").gradients)
    for gpu, rate, on_8 in (("a100", 938, 7248), ("v100", 367, 2855)):
        title = "A100, TF32" if gpu == "a100" else "V100"
        setup = training_on(buckets, rate, 8, GPUS[gpu].nvlink, gigabits=100)  # nothing passes the network of one node
        yield Case(f"NVIDIA, ResNet-50, 8 {title}", on_8 / 8 / rate, 256, 8, setup)


def tensorflow() -> Case:
    """Source: guide "Benchmarks", May 2017, synthetic data. Not published: which links the GPUs' sums took. One process
    starts the kernels of all 8 GPUs, which the model does not know either.
    """
    buckets = fill_buckets(costs_of("VGG-16").gradients, first=0, others=0)
    setup = training_on(buckets, 154, 8, NVLINK_P100, gigabits=100)
    return Case("TensorFlow, VGG-16, 8 P100", 1081 / 8 / 154, 64, 8, setup, inputs_are_published=False)


def li() -> Case:
    """Source: Li et al., PyTorch Distributed, VLDB 2020, section 5.3: a step takes twice as long as on one GPU.

    Not published: batch (assumed 32), step on one GPU (NVIDIA's V100), and what the shared cluster's network
    gave (assumed 100 Gbit/s a server).
    """
    setup = training_on(fill_buckets(costs_of("ResNet-50").gradients), 367, 8, GPUS["v100"].nvlink, gigabits=100)
    return Case(
        "Li et al., ResNet-50, 256 GPUs", efficiency=0.50, batch=32, gpus=256, setup=setup, inputs_are_published=False
    )


def cases() -> list[Case]:
    return [*horovod(), goyal(), *nvidia(), tensorflow(), li()]


def markdown() -> str:
    lines = ["| case | published | predicted |", "|---|--:|--:|"]
    for case in cases():
        mark = "" if case.inputs_are_published else " (\\*)"
        lines.append(f"| {case.name}{mark} | {1 - case.efficiency:.1%} | {case.lost:.1%} |")
    return "\n".join(lines)
