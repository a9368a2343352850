"""How much of the machine's arithmetic each level uses: its rate of floating-point operations beside a large matmul's.

The network's operations are counted by torch as it runs, multiplications and additions of convolutions and matrix
products, forward and backward; the optimizer and everything elementwise count as nothing, though they take time.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import records
from benchmarks.paired import Samples
from benchmarks.throughput import Configuration, Throughput
from benchmarks.workers import ranks
from common.accelerator.state import available_cores
from common.ladder import levels
from common.model import BasicNet

MATMUL = "matmul"
BATCH_PER_WORKER = 64


def flops_per_image() -> int:
    """Of a forward and backward of BasicNet, the same for any batch."""
    images, model = torch.zeros(2, 1, 28, 28), BasicNet()
    with FlopCounterMode(display=False) as counter:
        F.nll_loss(model(images), torch.zeros(2, dtype=torch.long)).backward()
    return counter.get_total_flops() // 2


def matmul_rate(seconds: float) -> float:
    """GFLOP/s of square float32 matrix products with all cores, or on the GPU; takes about `seconds`."""
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(available_cores())
    n = 8192 if on_gpu else 1024
    a, b = torch.randn(2, n, n, device="cuda" if on_gpu else "cpu")
    torch.mm(a, b)
    _synchronise(on_gpu)
    began, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + seconds:
        torch.mm(a, b)
        _synchronise(on_gpu)
        count += 1
    return count * 2 * n**3 / (now - began) / 1e9


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def configurations() -> list[Configuration]:
    """Every level with all cores: level 00 in one process, the others on two workers."""
    workers = {level: 1 if level == "00_single_gpu" else 2 for level in levels()}
    return [Configuration(level, count, count * BATCH_PER_WORKER) for level, count in workers.items()]


def contestants(rows: Throughput, seconds: float) -> dict[str, Callable[[], float]]:
    """In GFLOP/s."""
    gflops = flops_per_image() / 1e9
    found = {MATMUL: lambda: ranks(1).run(matmul_rate, seconds)[0]}
    for name, images_per_sec in rows.contestants.items():
        found[name] = lambda images_per_sec=images_per_sec: images_per_sec() * gflops
    return found


def record(samples: Samples, facts: dict[str, dict]) -> dict:
    """With the fraction of the matmul's rate that each level reaches."""
    note = f"{flops_per_image() / 1e6:.2f} MFLOP per image, forward and backward; "
    note += f"batch {BATCH_PER_WORKER} for each worker."
    ratios = [(name, MATMUL) for name in samples if name != MATMUL]
    return records.group("floating-point operations", "GFLOP/s", samples, facts, ratios, notes=[note])
