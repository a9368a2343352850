"""What DDP's options do to the time of a step: where gradients lie, how large a bucket is, whether the graph is static.

Two ranks train BasicNet with level 02's wrapper and the options of a row; on two GPUs with nccl, else on the CPU with
gloo. An option changes how the gradients travel and not what they are, so every row is first held against DDP without
options: after CHECKED_STEPS steps in float64 without dropout the weights are the same, within TOLERANCE.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group
from benchmarks.harness.paired import measure
from benchmarks.harness.process_facts import process_facts
from common.cores import available_cores
from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks

RANKS = 2
BATCH_SIZE = 64  # of one rank
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 3  # DDP orders its buckets anew after the first step
CHECKED_STEPS = 10
# Rounding alone, in float64, as in `limit` and `verdicts`: on GPUs cuDNN may sum in another order in every run.
TOLERANCE = 1e-9
EVERYTHING = 1024  # MiB: one bucket for all gradients
PLAIN = "no options"
OPTIONS: dict[str, dict] = {
    PLAIN: {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "bucket_cap_mb=1": {"bucket_cap_mb": 1},
    "one bucket": {"bucket_cap_mb": EVERYTHING},
    "views, static, one bucket": {
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "bucket_cap_mb": EVERYTHING,
    },
}
TITLE = f"DDP's options: {RANKS} processes, batch {BATCH_SIZE} each"


class Training:
    """BasicNet on this rank, in DDP with `options`. The process group of all ranks must be there."""

    def __init__(self, options: dict, dtype: torch.dtype = torch.float32, dropout: bool = True) -> None:
        self.device = _device(dist.get_rank())
        torch.manual_seed(0)  # the same weights on every rank
        network = BasicNet(dropout).to(self.device, dtype)
        self.model = DistributedDataParallel(network, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        noise = torch.Generator().manual_seed(dist.get_rank())
        images = torch.randn(BATCH_SIZE, 1, 28, 28, generator=noise)
        labels = torch.randint(10, (BATCH_SIZE,), generator=noise)
        self.images = images.to(self.device, dtype)
        self.labels = labels.to(self.device)

    def train(self, steps: int) -> None:
        """Take some steps on this rank's batch, and wait until the last is done."""
        for _ in range(steps):
            loss = F.nll_loss(self.model(self.images), self.labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def seconds_per_step(name: str, steps: int) -> float:
    """On a rank: the time of a step with the options of row `name`."""
    with _ranks_together():
        training = Training(OPTIONS[name])
        training.train(WARM_UP_STEPS)
        dist.barrier()
        began = time.perf_counter()
        training.train(steps)
        return (time.perf_counter() - began) / steps


def weights(name: str) -> Tensor:
    """On a rank: all parameters after CHECKED_STEPS steps in float64, as one vector on the CPU."""
    with _ranks_together():
        training = Training(OPTIONS[name], torch.float64, dropout=False)
        training.train(CHECKED_STEPS)
        return nn.utils.parameters_to_vector(training.model.parameters()).detach().cpu()


def rank_facts() -> dict:
    """On a rank: how it is set while it trains, see `process_facts`."""
    with _ranks_together():
        return process_facts()


@contextmanager
def _ranks_together() -> Iterator[None]:
    """The process group of the ranks, each with its share of the cores."""
    threads = max(1, available_cores() // RANKS)
    torch.set_num_threads(threads)
    device = _device(int(os.environ["RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with process_group("nccl" if device.type == "cuda" else "gloo"):
        yield


def _device(rank: int) -> torch.device:
    if torch.cuda.device_count() < RANKS:
        return torch.device("cpu")
    return torch.device("cuda", rank)


def distance(name: str, plain: Tensor) -> float:
    """The largest difference between the weights with the options of `name` and those without options, `plain`."""
    ours, *_ = ranks(RANKS).run(weights, name)
    return (ours - plain).abs().max().item()


def groups() -> list[Group]:
    return [Group("ddp", TITLE, tuple(OPTIONS), measured)]


def measured(rows: tuple[str, ...], extent: Extent) -> dict:
    """The record of these rows.

    Raises:
        ValueError: naming a row whose weights are not those of DDP without options.
    """
    steps = 2 if extent.quick else 40
    facts = {}
    plain, *_ = ranks(RANKS).run(weights, PLAIN)
    facts_of_rank_0, *_ = ranks(RANKS).run(rank_facts)
    for name in rows:
        far = distance(name, plain)
        if not far <= TOLERANCE:
            raise ValueError(f"{name} is another training: |Δw| is {far:.1e}, not below {TOLERANCE:.0e}")
        facts[name] = {
            "processes": RANKS,
            "global_batch_size": RANKS * BATCH_SIZE,
            "steps": steps,
            "max_weight_difference": far,
            "tolerance": TOLERANCE,
            **facts_of_rank_0,
        }
    contestants: dict[str, Callable[[], float]] = {name: partial(_images_per_sec, name, steps) for name in rows}
    samples = measure(contestants, extent.rounds)
    pairs = [(name, PLAIN) for name in OPTIONS if name != PLAIN]
    return records.group(TITLE, "images/s", samples, facts, pairs)


def _images_per_sec(name: str, steps: int) -> float:
    slowest = max(ranks(RANKS).run(seconds_per_step, name, steps))
    return RANKS * BATCH_SIZE / slowest
