"""A larger batch and its learning rate: the same samples in fewer steps, by four rules, with AdamW and with SGD.

Each rank brings a batch of 64, so that k ranks make a batch k times as large. Every training sees one epoch in the same
order, and a larger batch leaves fewer steps for it. The learning rate is kept, or multiplied by √k, or by k. Each
optimizer has a fourth rule, which says what else the literature asks for:

- AdamW: √k, and the betas follow (Malladi et al., 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
  Algorithms"). A moving average over so many samples has a k-th of the steps for it.
- SGD: k, after a warm-up (Goyal et al., 2017, "Accurate, Large Minibatch SGD").

The network is a small one, so that all trainings take some minutes on one core. No process group is needed: the
gradient of a batch is what DDP would average.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group
from common.args import parse_args
from common.data import load_data
from common.ladder import script

BATCH = 64  # of one rank
RANKS = (1, 2, 4, 8)
SEEDS = 3
QUICK_SAMPLES = 2048  # for the training with --quick
BETAS = (0.9, 0.999)  # AdamW's own
EPS = 1e-8
WARM_UP = 0.2  # of all steps
GUESSING = math.log(10)  # the loss of a network that gives all ten digits the same probability


@dataclass(frozen=True)
class Rule:
    """A rule for k times the batch.

    Attributes:
        name: as it stands in the table and in the picture.
        factor: of the learning rate, from k.
        scales_betas: whether AdamW's moving averages go over as many samples as with one rank.
        warms_up: whether the rate grows from 0 during the first steps.
    """

    name: str
    factor: Callable[[int], float]
    scales_betas: bool = False
    warms_up: bool = False


KEPT = Rule("× 1", lambda ranks: 1.0)
ROOT = Rule("× √k", math.sqrt)
LINEAR = Rule("× k", float)
RULES = {
    "AdamW": (KEPT, ROOT, LINEAR, Rule("× √k, betas too", math.sqrt, scales_betas=True)),
    "SGD": (KEPT, ROOT, LINEAR, Rule("× k, warm-up", float, warms_up=True)),
}


class Start(NamedTuple):
    """An optimizer and its learning rate for one rank."""

    optimizer: str
    rate: float


# The rates of AdamW and the last one of SGD are near the best for one rank, of a row of rates that double.
STARTS = (Start("AdamW", 4e-3), Start("SGD", 0.05), Start("SGD", 0.2))


class Digits(NamedTuple):
    """Images of shape (n, 1, 14, 14), MNIST's at half of their width and height, and their labels."""

    images: Tensor
    labels: Tensor


def digits(data_flags: list[str]) -> tuple[Digits, Digits]:
    """The training and the test set."""
    args = parse_args(str(script("00_single_gpu")), ["--device", "cpu", *data_flags])
    sets = []
    for dataset in load_data(args):
        images, labels = dataset.__getitems__(list(range(len(dataset))))
        sets.append(Digits(F.avg_pool2d(images, 2), labels))
    return sets[0], sets[1]


def small_network() -> nn.Sequential:
    """Two convolutions and a linear layer with 9,098 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def make_optimizer(start: Start, network: nn.Module, ranks: int, rule: Rule) -> torch.optim.Optimizer:
    rate = start.rate * rule.factor(ranks)
    if start.optimizer == "SGD":
        return torch.optim.SGD(network.parameters(), lr=rate)
    if not rule.scales_betas:
        return torch.optim.AdamW(network.parameters(), lr=rate, betas=BETAS, eps=EPS)
    # 1 / (1 - beta) is the number of steps over which a moving average goes. A step has k times the samples now.
    betas = (1 - ranks * (1 - BETAS[0]), 1 - ranks * (1 - BETAS[1]))
    return torch.optim.AdamW(network.parameters(), lr=rate, betas=betas, eps=EPS / math.sqrt(ranks))


def trained_loss(start: Start, ranks: int, rule: Rule, seed: int, train: Digits, test: Digits) -> float:
    """The mean loss on the test images after one epoch with the batch of so many ranks.

    At most GUESSING: a training whose steps were too long ends there, or beyond any number.
    """
    torch.manual_seed(seed)
    network = small_network()
    optimizer = make_optimizer(start, network, ranks, rule)
    batch_size = BATCH * ranks
    steps = len(train.images) // batch_size
    warm_up_steps = math.ceil(WARM_UP * steps) if rule.warms_up else 1
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up_steps))
    order = torch.randperm(len(train.images), generator=torch.Generator().manual_seed(seed))
    for step in range(steps):
        chosen = order[step * batch_size : (step + 1) * batch_size]
        loss = F.cross_entropy(network(train.images[chosen]), train.labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        loss = F.cross_entropy(network(test.images), test.labels).item()
    return loss if loss < GUESSING else GUESSING


def groups() -> list[Group]:
    """One for each start. A loss is no time, so what is measured is no row of the group's."""
    found = []
    for start in STARTS:
        key = f"larger_batches-{start.optimizer}-{start.rate:g}"
        found.append(Group(key, title(start), (), partial(measured, start)))
    return found


def title(start: Start) -> str:
    return f"{start.optimizer}, rate {start.rate:g} for one rank: test loss after one epoch; a round is a seed"


def measured(start: Start, extent: Extent) -> dict:
    """The record of one start: a row for each batch and rule, a sample a seed."""
    few = ["--train-samples", str(QUICK_SAMPLES)] if extent.quick else []
    train, test = digits([*extent.data_flags, *few])
    samples: dict[str, list[float]] = {}
    facts: dict[str, dict] = {}
    for ranks in RANKS:
        for rule in RULES[start.optimizer] if ranks > 1 else (KEPT,):
            row = f"batch {BATCH * ranks}, rate {rule.name}" if ranks > 1 else f"batch {BATCH}"
            samples[row] = [trained_loss(start, ranks, rule, seed, train, test) for seed in range(SEEDS)]
            facts[row] = {"ranks": ranks, "rule": rule.name, "learning_rate": start.rate * rule.factor(ranks)}
    group = records.group(title(start), "loss", samples, facts)
    return group | {"optimizer": start.optimizer, "rate": start.rate, "training_samples": len(train.images)}
