"""Predictions compared with measurements that others have published, and that nothing here was fitted to.

Sources, by the first words of a case's name:

- Horovod: README.md of October 2017, first table (RDMA, NCCL), for 16 GPUs and the images/s of one at batch 64;
  README.md of 2018, with a picture of 128 GPUs; docs/benchmarks.rst for 512. 4 Pascal GPUs a server on PCIe (issue
  979), RoCE at 25 Gbit/s. It sends what is ready, up to 64 MB at a time (docs/tensor-fusion.rst); NCCL had only rings.
- Goyal et al. 2017, arXiv 1706.02677, section 5.5 and figure 8: 8 P100 with NVLink a server, Ethernet at 50 Gbit/s,
  backward 120 ms (section 4.3), gradients one by one, halving and doubling between servers (section 4.1).
- NVIDIA, DeepLearningExamples, PyTorch ResNet50 v1.5. The data are read from disk, which the model does not know.
- TensorFlow, guide "Benchmarks", May 2017, synthetic data. Not published: which links the GPUs' sums took. One process
  starts the kernels of all 8 GPUs, which the model does not know either.
- Li et al., PyTorch Distributed, VLDB 2020, section 5.3: a step takes twice as long as on one GPU. Not published: batch
  (assumed 32, 16 to 64), step on one GPU (NVIDIA's V100), and what the shared cluster's network gave (assumed 100
  Gbit/s a server, down to a tenth of it).
"""

from dataclasses import dataclass, replace

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
from benchmarks.predict.step import DDP, HOROVOD, Buckets, Workload

WITHIN = 2  # the factor by which a prediction may be off where all inputs are published
ONE_BY_ONE = Buckets(size=0, first=0)


@dataclass(frozen=True)
class Case:
    """A published efficiency, and what is known of how it was measured.

    Attributes:
        efficiency: throughput on `gpus` GPUs as a share of `gpus` / `baseline` times that on `baseline` GPUs.
        setup: what was trained, on which links, with how many samples for each GPU.
        inputs_are_published: whether bytes, the step on one GPU and the links are.
    """

    name: str
    efficiency: float
    setup: Setup
    gpus: int
    baseline: int = 1
    assumptions: tuple[Assumption, ...] = USUAL
    inputs_are_published: bool = True

    @property
    def lost(self) -> float:
        """The predicted share of the throughput that is lost: 0.1 stands for an efficiency of 90 %."""
        return 1 - self.setup.step(self.baseline) / self.setup.step(self.gpus)

    @property
    def off_by(self) -> float:
        """The factor between the predicted and the published loss, at least 1."""
        ratio = self.lost / (1 - self.efficiency)
        return max(ratio, 1 / ratio)

    @property
    def kind(self) -> float:
        """What is lost with the kind end of every assumption."""
        return replace(self, setup=all_kind(self.setup, self.assumptions)).lost

    @property
    def harsh(self) -> float:
        """What is lost with the harsh end of every assumption."""
        return replace(self, setup=all_harsh(self.setup, self.assumptions)).lost


def workload(name: str, rate: float, buckets: Buckets, backward_share: float = 2 / 3) -> Workload:
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


def cases() -> list[Case]:
    found = []
    cluster = Cluster(4, INNER["pcie3"], ethernet(25), RING, START)
    alone = {"Inception V3": 134.4, "ResNet-101": 119.4, "VGG-16": 130.9}
    on_16 = {"Inception V3": 2022.6, "ResNet-101": 1746.2, "VGG-16": 1787.4}
    efficiencies = {
        16: {name: rate / 16 / alone[name] for name, rate in on_16.items()},
        128: {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.79},
        512: {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68},
    }
    for gpus, published in efficiencies.items():
        for name, efficiency in published.items():
            setup = Setup(workload(name, alone[name], HOROVOD), cluster, batch=64)
            found.append(Case(f"Horovod, {name}, {gpus} GPUs", efficiency, setup, gpus))

    # 352 GPUs take 1.28 million images in 30 s, 11,264 in a step, and their step is 12 % longer than that of 8.
    seconds = 30 / (1.28e6 / 11_264) / 1.12
    cluster = Cluster(8, INNER["nvlink-p100"], ethernet(50), RING_AND_TREE, START)
    training = workload("ResNet-50", 32 / seconds, ONE_BY_ONE, backward_share=0.120 / seconds)
    known = (SPREAD, OVERLAP, LATENCY)
    name = "Goyal et al., ResNet-50, 8 to 256 GPUs"
    found.append(Case(name, 0.90, Setup(training, cluster, batch=32), gpus=256, baseline=8, assumptions=known))

    for gpu, inner, rate, on_8 in (("A100, TF32", "nvlink-a100", 938, 7248), ("V100", "nvlink-v100", 367, 2855)):
        cluster = Cluster(8, INNER[inner], ethernet(100), RING, START)  # nothing passes the network of one node
        setup = Setup(workload("ResNet-50", rate, DDP), cluster, batch=256)
        found.append(Case(f"NVIDIA, ResNet-50, 8 {gpu}", on_8 / 8 / rate, setup, gpus=8))

    cluster = Cluster(8, INNER["nvlink-p100"], ethernet(100), RING, START)
    setup = Setup(workload("VGG-16", 154, ONE_BY_ONE), cluster, batch=64)
    found.append(Case("TensorFlow, VGG-16, 8 P100", 1081 / 8 / 154, setup, gpus=8, inputs_are_published=False))

    cluster = Cluster(8, INNER["nvlink-v100"], ethernet(100), FASTEST, START)
    setup = Setup(workload("ResNet-50", 367, DDP), cluster, batch=32)
    unknown = (*USUAL, Assumption("batch", 64, 16), Assumption("bandwidth", 1.0, 0.1))
    name = "Li et al., ResNet-50, 256 GPUs"
    found.append(Case(name, 0.50, setup, gpus=256, assumptions=unknown, inputs_are_published=False))
    return found


def markdown() -> str:
    """The cases as a table for a page, of Horovod's the smallest and the largest."""
    lines = ["| case | published | predicted | range |", "|---|--:|--:|--:|"]
    for case in cases():
        if "128 GPUs" in case.name:
            continue
        mark = "" if case.inputs_are_published else " (\\*)"
        predicted = f"{case.lost:.1%} | {100 * case.kind:.0f}–{100 * case.harsh:.0f} %"
        lines.append(f"| {case.name}{mark} | {1 - case.efficiency:.1%} | {predicted} |")
    return "\n".join(lines)
