"""The levels under a roofline: what each computes and moves in a second, beside what this machine can.

The roof is the lower one of two limits: the rate of a large matrix product, and the rate at which large tensors are
copied times the operations that a level does for each byte it moves. A level far below its roof waits for something
else: for launches, for Python, for other ranks. Source: Williams, Waterman and Patterson, "Roofline", CACM 2009.

All levels train on the same global batch, with all cores or with a GPU for each worker. Both limits are measured with
all cores or on one GPU, so the roof of a level that uses several GPUs is as many times as high.

Operations are counted by torch as it runs: multiplications and additions of convolutions and matrix products. Bytes are
those that the operations of a step read and write, the optimizer's among them, as though nothing stayed in a cache.
They are counted for one process without others, and once for each process. What a level sends is not among them:
neither the gradients that processes average nor the copies of the weights that level 01 makes for its replicas.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group, chosen
from benchmarks.harness.paired import Samples, measure, summarise
from benchmarks.suites.throughput import Configuration, Throughput
from common.cores import available_cores
from common.ladder import levels
from common.model import BasicNet
from common.processes import ranks

MATMUL = "matrix product"
COPY = "copy"
MACHINE = (MATMUL, COPY)
BATCH_SIZE = 128  # of each level, over all of its workers
TITLE = "a step under the roofline"
SIZE_ON_CPU = 1024
SIZE_ON_GPU = 8192
# More than the caches of processors and GPUs hold.
COPIED_BYTES = 2**28


@dataclass(frozen=True)
class Work:
    """What one step has to do, over all processes.

    Attributes:
        flops: floating-point operations of convolutions and matrix products.
        moved: bytes that its operations read and write.
    """

    flops: int
    moved: int

    def __mul__(self, processes: int) -> "Work":
        """What so many processes have to do, each this work."""
        return Work(self.flops * processes, self.moved * processes)

    def roof(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The most operations in a second that these two limits allow."""
        return min(flops_per_second, self.flops / self.moved * bytes_per_second)


class _Bytes(TorchDispatchMode):
    """Adds up the bytes of what operations read and write. A view moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in tree_iter((args, kwargs, results)):
                if isinstance(leaf, Tensor):
                    self.moved += leaf.nbytes
        return results


@cache
def work(batch_size: int) -> Work:
    """Of one step of level 00 at this batch."""
    model = BasicNet()
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.zeros(batch_size, 1, 28, 28)
    targets = torch.zeros(batch_size, dtype=torch.long)
    _step(model, optimizer, images, targets)  # the optimizer's state is made here
    with FlopCounterMode(display=False) as flops, _Bytes() as bytes_:
        _step(model, optimizer, images, targets)
    return Work(flops=flops.get_total_flops(), moved=bytes_.moved)


def _step(model: BasicNet, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> None:
    F.nll_loss(model(images), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def flops_per_image() -> int:
    """Of a forward and backward of BasicNet, the same for any batch."""
    return work(2).flops // 2


def matmul_seconds(seconds: float) -> float:
    """Seconds of a square float32 matrix product with all cores, or on the GPU; measuring takes about `seconds`.

    On a GPU it is a TF32 product, because cuDNN computes the levels' convolutions so.
    """
    device, size = _device_and_size()
    a = torch.randn(size, size, device=device)
    b = torch.randn(size, size, device=device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return _seconds_of(lambda: torch.mm(a, b), seconds)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def copy_seconds(seconds: float) -> float:
    """Seconds of a copy of COPIED_BYTES with all cores, or on the GPU; measuring takes about `seconds`."""
    device, _ = _device_and_size()
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds_of(lambda: target.copy_(source), seconds)


def _device_and_size() -> tuple[str, int]:
    """Where the machine's limits are measured, and the rows of the matrices."""
    if torch.cuda.is_available():
        return "cuda", SIZE_ON_GPU
    torch.set_num_threads(available_cores())
    return "cpu", SIZE_ON_CPU


def _seconds_of(run: Callable[[], Any], seconds: float) -> float:
    """The mean over as many runs as fit into `seconds`, after one that is not counted."""
    run()
    _synchronise()
    count = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        run()
        _synchronise()
        count += 1
        now = time.perf_counter()
    return (now - began) / count


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def configurations() -> list[Configuration]:
    """Every level at one global batch with all cores: level 00 in one process, the others on two workers."""
    first, *others = levels()
    return [Configuration(first, 1, BATCH_SIZE), *[Configuration(level, 2, BATCH_SIZE) for level in others]]


def groups() -> list[Group]:
    names = [configuration.name for configuration in configurations()]
    return [Group("ceiling", TITLE, (*MACHINE, *names), measured)]


def measured(rows: tuple[str, ...], extent: Extent) -> dict:
    own = [configuration for configuration in configurations() if configuration.name in rows]
    timed = Throughput(own, extent.seconds, extent.data_flags, extent.quick) if own else None
    samples = measure(chosen(contestants(timed, extent.seconds), rows), extent.rounds)
    return record(samples, timed.facts if timed else {}, torch.cuda.device_count())


def contestants(timed: Throughput | None, seconds: float) -> dict[str, Callable[[], float]]:
    """In ms: a product, a copy, and a step of each level."""
    found = {
        MATMUL: lambda: 1000 * ranks(1).run(matmul_seconds, seconds)[0],
        COPY: lambda: 1000 * ranks(1).run(copy_seconds, seconds)[0],
    }
    if timed:
        for name in timed.contestants:
            found[name] = partial(_milliseconds, timed, name)
    return found


def _milliseconds(timed: Throughput, name: str) -> float:
    images_per_sec = timed.contestants[name]()
    return 1000 * timed.configurations[name].batch_size / images_per_sec


def record(samples: Samples, facts: dict[str, dict], gpus: int) -> dict:
    """With what each row computes, and the share that it reaches of its roof. The machine has so many `gpus`."""
    machine = _machine_facts(samples)
    own = {}
    for name in samples:
        if name in MACHINE:
            own[name] = machine[name]
        else:
            own[name] = facts[name] | _facts_of_level(name, samples, facts[name], machine, gpus)
    return records.group(TITLE, "ms", samples, own, notes=_notes(own, machine))


def _machine_facts(samples: Samples) -> dict[str, dict]:
    """What the machine reaches at most, where it was measured."""
    found = {}
    if MATMUL in samples:
        size = SIZE_ON_GPU if torch.cuda.is_available() else SIZE_ON_CPU
        gflops = 2 * size**3 / 1e9 / (_median_seconds(samples, MATMUL))
        precision = "TF32" if torch.cuda.is_available() else "float32"
        found[MATMUL] = {"gflops_per_sec": records.rounded(gflops), "precision": precision}
    if COPY in samples:
        # Each byte is read and written.
        gigabytes = 2 * COPIED_BYTES / 1e9 / _median_seconds(samples, COPY)
        found[COPY] = {"gigabytes_per_sec": records.rounded(gigabytes)}
    return found


def _facts_of_level(name: str, samples: Samples, facts: dict, machine: dict[str, dict], gpus: int) -> dict:
    step = work(facts["global_batch_size"] // facts["processes"]) * facts["processes"]
    rate = step.flops / 1e9 / _median_seconds(samples, name)
    devices = min(facts["workers"], gpus) if facts["device"] == "cuda" else 1
    found = {
        "devices": devices,
        "gflops_per_sec": records.rounded(rate),
        "gflop_per_step": records.rounded(step.flops / 1e9),
        "gigabytes_per_step": records.rounded(step.moved / 1e9),
    }
    if len(machine) == len(MACHINE):
        roof = devices * step.roof(machine[MATMUL]["gflops_per_sec"], machine[COPY]["gigabytes_per_sec"])
        found["roof_gflops_per_sec"] = records.rounded(roof)
        found["share_of_roof"] = records.rounded(rate / roof)
    return found


def _median_seconds(samples: Samples, name: str) -> float:
    return summarise(samples[name]).median / 1000


def _notes(facts: dict[str, dict], machine: dict[str, dict]) -> list[str]:
    lines = []
    if len(machine) == len(MACHINE):
        product = machine[MATMUL]
        measured_on = "One GPU" if torch.cuda.is_available() else "This machine"
        lines.append(
            f"{measured_on}: {product['gflops_per_sec']:.4g} GFLOP/s in a large {product['precision']} matrix product, "
            f"{machine[COPY]['gigabytes_per_sec']:.3g} GB/s in a large copy."
        )
    lines.append(
        f"{flops_per_image() / 1e6:.2f} MFLOP per image, forward and backward; "
        f"global batch {BATCH_SIZE}. A step's roof is what the product's rate or the copy's allows."
    )
    for name, row in facts.items():
        if "share_of_roof" in row:
            roof = f"{row['roof_gflops_per_sec']:.4g}"
            lines.append(f"{name}: {row['gflops_per_sec']:.4g} GFLOP/s, {row['share_of_roof']:.0%} of its roof {roof}.")
    return lines
