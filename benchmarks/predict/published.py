"""Predictions compared with measurements that others have published, and that nothing here was fitted to.

Each case says where its inputs are from. What is not published is an assumption. A case's range is the prediction with
all of its assumptions kind, and with all of them harsh.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.predict import presets
from benchmarks.predict.all_reduce import FASTEST, RING, RING_AND_TREE, Cluster
from benchmarks.predict.assumptions import (
    LATENCY,
    OVERLAP,
    SPREAD,
    USUAL,
    Assumption,
    Setup,
    all_harsh,
    all_kind,
)
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import INNER, START, ethernet
from benchmarks.predict.step import DDP, HOROVOD, Buckets, Workload, without_effects

WITHIN = 2  # the factor by which a prediction may be off where all inputs are published
ONE_BY_ONE = Buckets(size=0, first=0)


@dataclass(frozen=True)
class Case:
    """A published efficiency, and what is known of how it was measured.

    Attributes:
        name: network and number of GPUs.
        source: where the efficiency is published.
        efficiency: throughput on `gpus` GPUs as a share of `gpus` / `baseline` times that on `baseline` GPUs.
        setup: what was trained, on which links, with how many samples for each GPU.
        inputs_are_published: whether bytes, the step on one GPU and the links are.
        remark: which inputs are from where, and what else is to be said.
    """

    name: str
    source: str
    efficiency: float
    setup: Setup
    gpus: int
    baseline: int = 1
    assumptions: tuple[Assumption, ...] = USUAL
    inputs_are_published: bool = True
    remark: str = ""


class Prediction(NamedTuple):
    """Shares of the throughput that are lost: of a perfect scaling 1, so that 0.1 stands for an efficiency of 90 %."""

    lost: float
    network_alone: float  # with GPUs that are all equally fast and are not slowed down by an all-reduce
    kind: float
    harsh: float


def predict(case: Case) -> Prediction:
    alone = replace(case.setup, training=without_effects(case.setup.training))
    kind = all_kind(case.setup, case.assumptions)
    harsh = all_harsh(case.setup, case.assumptions)
    return Prediction(
        lost=lost(case),
        network_alone=lost(replace(case, setup=alone)),
        kind=lost(replace(case, setup=kind)),
        harsh=lost(replace(case, setup=harsh)),
    )


def lost(case: Case) -> float:
    """The predicted share of the throughput that is lost."""
    return 1 - case.setup.step(case.baseline) / case.setup.step(case.gpus)


def off_by(case: Case) -> float:
    """The factor between the predicted and the published loss, at least 1."""
    ratio = lost(case) / (1 - case.efficiency)
    return max(ratio, 1 / ratio)


def cases() -> list[Case]:
    found = _horovod()
    found.append(_goyal())
    found += _one_node()
    found.append(_tensorflow())
    found.append(_li())
    return found


HOROVOD_TABLE = (
    "Horovod, README.md of October 2017, first table (RDMA, NCCL); images/s of one GPU: 134.4, 119.4, 130.9 at batch 64"
)
HOROVOD_PICTURE = "Horovod, docs/benchmarks.rst"
HOROVOD_INPUTS = (
    "4 Pascal GPUs a server on PCIe (issue 979), RoCE at 25 Gbit/s. Horovod sends what is ready, up to 64 MB at a time "
    "(docs/tensor-fusion.rst); NCCL had only rings."
)


def _horovod() -> list[Case]:
    alone = {"Inception V3": 134.4, "ResNet-101": 119.4, "VGG-16": 130.9}
    on_16 = {"Inception V3": 2022.6, "ResNet-101": 1746.2, "VGG-16": 1787.4}
    found = []
    for name, rate in alone.items():
        found.append(_of_horovod(name, rate, 16, on_16[name] / 16 / rate, HOROVOD_TABLE))
    for gpus, of_vgg in ((128, 0.79), (512, 0.68)):
        for name, rate in alone.items():
            efficiency = of_vgg if name == "VGG-16" else 0.90
            source = HOROVOD_PICTURE if gpus == 512 else "Horovod, README.md of 2018, with a picture of 128 GPUs"
            found.append(_of_horovod(name, rate, gpus, efficiency, source))
    return found


def _of_horovod(name: str, rate: float, gpus: int, efficiency: float, source: str) -> Case:
    cluster = Cluster(4, INNER["pcie3"], ethernet(25), RING, START)
    training = _training(name, rate, HOROVOD)
    title = f"Horovod, {name}, {gpus} GPUs"
    return Case(title, source, efficiency, Setup(training, cluster, batch=64), gpus, remark=HOROVOD_INPUTS)


def _training(name: str, rate: float, buckets: Buckets, backward_share: float = 2 / 3) -> Workload:
    """Of a network whose samples per second on one GPU are published; launches do not bound these steps."""
    return Workload(
        networks()[name],
        1 / rate,
        launch_seconds=0.0,
        backward_share=backward_share,
        buckets=buckets,
        speed_spread=presets.SPEED_SPREAD,
        contention=presets.CONTENTION,
    )


def _goyal() -> Case:
    # 352 GPUs take 1.28 million images in 30 s, 11,264 in a step, and their step is 12 % longer than that of 8.
    seconds = 30 / (1.28e6 / 11_264) / 1.12
    cluster = Cluster(8, INNER["nvlink-p100"], ethernet(50), RING_AND_TREE, START)
    training = _training("ResNet-50", 32 / seconds, ONE_BY_ONE, backward_share=0.120 / seconds)
    return Case(
        "Goyal et al., ResNet-50, 8 to 256 GPUs",
        "Goyal et al. 2017, arXiv 1706.02677, section 5.5 and figure 8",
        0.90,
        Setup(training, cluster, batch=32),
        gpus=256,
        baseline=8,
        assumptions=(SPREAD, OVERLAP, LATENCY),
        remark="8 P100 with NVLink a server, Ethernet at 50 Gbit/s, backward 120 ms (section 4.3), a step of 0.236 s "
        "on 8 GPUs (from section 5.5), gradients one by one, halving and doubling between servers (section 4.1).",
    )


def _one_node() -> list[Case]:
    source = "NVIDIA, DeepLearningExamples, PyTorch ResNet50 v1.5, training performance"
    found = []
    for name, inner, rate, on_8 in (("A100, TF32", "nvlink-a100", 938, 7248), ("V100", "nvlink-v100", 367, 2855)):
        # Nothing passes the network of one node.
        cluster = Cluster(8, INNER[inner], ethernet(100), RING, START)
        training = _training("ResNet-50", rate, DDP)
        title = f"NVIDIA, ResNet-50, 8 {name}"
        remark = "NVLink. The data are read from disk, which the model does not know."
        setup = Setup(training, cluster, batch=256)
        found.append(Case(title, source, on_8 / 8 / rate, setup, gpus=8, remark=remark))
    return found


def _tensorflow() -> Case:
    cluster = Cluster(8, INNER["nvlink-p100"], ethernet(100), RING, START)
    return Case(
        "TensorFlow, VGG-16, 8 P100",
        "TensorFlow, guide “Benchmarks”, May 2017, synthetic data",
        1081 / 8 / 154,
        Setup(_training("VGG-16", 154, ONE_BY_ONE), cluster, batch=64),
        gpus=8,
        inputs_are_published=False,
        remark="Not published: which links the GPUs' sums took. They took NVLink only if the NCCL of that time used "
        "it; over PCIe the model would lose more. One process starts the kernels of all 8 GPUs, which the model does "
        "not know either.",
    )


def _li() -> Case:
    cluster = Cluster(8, INNER["nvlink-v100"], ethernet(100), FASTEST, START)
    return Case(
        "Li et al., ResNet-50, 256 GPUs",
        "Li et al., PyTorch Distributed, VLDB 2020, section 5.3: a step takes twice as long as on one GPU",
        0.50,
        Setup(_training("ResNet-50", 367, DDP), cluster, batch=32),
        gpus=256,
        assumptions=(*USUAL, Assumption("batch", 64, 16), Assumption("bandwidth", 1.0, 0.1)),
        inputs_are_published=False,
        remark="Not published: batch (assumed 32, 16 to 64), step on one GPU (NVIDIA's V100), and what the shared "
        "cluster's network gave (assumed 100 Gbit/s a server, as in the paper's own cluster of 32 GPUs, down to a "
        "tenth of it).",
    )
