"""Predictions compared with measurements that others have published, and that nothing here was fitted to.

Sources, by the first words of a case's name:

- Horovod: README.md of October 2017, first table (RDMA, NCCL), for 16 GPUs and the images/s of one at batch 64;
  README.md of 2018, with a picture of 128 GPUs; docs/benchmarks.rst for 512. 4 Pascal GPUs a server on PCIe (issue
  979), RoCE at 25 Gbit/s. It sends up to 64 MB at a time (docs/tensor-fusion.rst), which are taken for its bucket.
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

from benchmarks.predict.model import Setup, step
from benchmarks.predict.networks import networks
from benchmarks.predict.presets import BACKWARD_SHARE, CONTENTION, INNER, SPEED_SPREAD, START, ethernet

# The two ends of what nobody has published, as factors of a Setup's numbers. With the kind one the least time is lost.
KIND = {"speed_spread": 0.0, "contention": 0.0, "backward_share": 0.7 / BACKWARD_SHARE, "latency": 2.7 / 9.6}
HARSH = {
    "speed_spread": 0.22 / 0.08,
    "contention": 0.40 / CONTENTION,
    "backward_share": 0.6 / BACKWARD_SHARE,
    "latency": 1.9,
}
WITHIN = 2  # the factor by which a prediction may be off where all inputs are published
HOROVOD = {"bucket": 64 * 2**20, "first_bucket": 64 * 2**20}
ONE_BY_ONE = {"bucket": 0, "first_bucket": 0}


@dataclass(frozen=True)
class Case:
    """A published efficiency, and what is known of how it was measured.

    Attributes:
        efficiency: throughput on `gpus` GPUs as a share of `gpus` / `baseline` times that on `baseline` GPUs.
        setup: what was trained, on which links, with how many samples for each GPU.
        kind, harsh: the two ends of what is not published of it.
        inputs_are_published: whether bytes, the step on one GPU and the links are.
    """

    name: str
    efficiency: float
    setup: Setup
    kind: Setup
    harsh: Setup
    gpus: int
    baseline: int = 1
    inputs_are_published: bool = True

    def lost(self, setup: Setup) -> float:
        """The predicted share of the throughput that is lost: 0.1 stands for an efficiency of 90 %."""
        return 1 - step(setup, self.baseline) / step(setup, self.gpus)

    @property
    def off_by(self) -> float:
        """The factor between the predicted and the published loss, at least 1."""
        ratio = self.lost(self.setup) / (1 - self.efficiency)
        return max(ratio, 1 / ratio)


def scaled(setup: Setup, latency: float, **factors: float) -> Setup:
    """The setup with some of its numbers multiplied, and the latencies of its links."""
    links = {name: getattr(setup, name) for name in ("inner", "between")}
    slower = {name: link._replace(latency=latency * link.latency) for name, link in links.items()}
    return replace(setup, **slower, **{name: factor * getattr(setup, name) for name, factor in factors.items()})


def setup(name: str, rate: float, batch: int, node: int, inner: str, gigabits: float, **more: float) -> Setup:
    """Of a network whose samples per second on one GPU are published; launches do not bound these steps."""
    return Setup(
        networks()[name],
        batch,
        sample_seconds=1 / rate,
        launch_seconds=0.0,
        gpus_per_node=node,
        inner=INNER[inner],
        between=ethernet(gigabits),
        start=START,
        speed_spread=SPEED_SPREAD,
        contention=CONTENTION,
        **more,
    )


def case(name: str, efficiency: float, setup: Setup, gpus: int, **more: bool) -> Case:
    return Case(name, efficiency, setup, scaled(setup, **KIND), scaled(setup, **HARSH), gpus, **more)


def cases() -> list[Case]:
    found = []
    alone = {"Inception V3": 134.4, "ResNet-101": 119.4, "VGG-16": 130.9}
    on_16 = {"Inception V3": 2022.6, "ResNet-101": 1746.2, "VGG-16": 1787.4}
    efficiencies = {
        16: {name: rate / 16 / alone[name] for name, rate in on_16.items()},
        128: {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.79},
        512: {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68},
    }
    for gpus, published in efficiencies.items():
        for name, efficiency in published.items():
            trained = setup(name, alone[name], 64, 4, "pcie3", 25, **HOROVOD)
            found.append(case(f"Horovod, {name}, {gpus} GPUs", efficiency, trained, gpus))

    # 352 GPUs take 1.28 million images in 30 s, 11,264 in a step, and their step is 12 % longer than that of 8.
    seconds = 30 / (1.28e6 / 11_264) / 1.12
    trained = setup("ResNet-50", 32 / seconds, 32, 8, "nvlink-p100", 50, **ONE_BY_ONE)
    kind = replace(scaled(trained, **KIND), backward_share=0.120 / seconds)
    harsh = replace(scaled(trained, **HARSH), backward_share=0.120 / seconds)
    trained = replace(trained, backward_share=0.120 / seconds)
    found.append(Case("Goyal et al., ResNet-50, 8 to 256 GPUs", 0.90, trained, kind, harsh, gpus=256, baseline=8))

    for gpu, inner, rate, on_8 in (("A100, TF32", "nvlink-a100", 938, 7248), ("V100", "nvlink-v100", 367, 2855)):
        trained = setup("ResNet-50", rate, 256, 8, inner, 100)  # nothing passes the network of one node
        found.append(case(f"NVIDIA, ResNet-50, 8 {gpu}", on_8 / 8 / rate, trained, gpus=8))

    trained = setup("VGG-16", 154, 64, 8, "nvlink-p100", 100, **ONE_BY_ONE)
    found.append(case("TensorFlow, VGG-16, 8 P100", 1081 / 8 / 154, trained, gpus=8, inputs_are_published=False))

    trained = setup("ResNet-50", 367, 32, 8, "nvlink-v100", 100)
    kind = scaled(trained, **KIND, batch=2)
    harsh = scaled(replace(trained, between=ethernet(10)), **HARSH, batch=0.5)
    name = "Li et al., ResNet-50, 256 GPUs"
    found.append(Case(name, 0.50, trained, kind, harsh, gpus=256, inputs_are_published=False))
    return found


def markdown() -> str:
    """The cases as a table for a page, of Horovod's the smallest and the largest."""
    lines = ["| case | published | predicted | range |", "|---|--:|--:|--:|"]
    for case in cases():
        if "128 GPUs" in case.name:
            continue
        mark = "" if case.inputs_are_published else " (\\*)"
        least = 100 * case.lost(case.kind)
        most = 100 * case.lost(case.harsh)
        predicted = f"{case.lost(case.setup):.1%} | {least:.0f}–{most:.0f} %"
        lines.append(f"| {case.name}{mark} | {1 - case.efficiency:.1%} | {predicted} |")
    return "\n".join(lines)
