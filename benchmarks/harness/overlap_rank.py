"""Jobs of one rank for `benchmarks.suites.overlap`: time some steps and count its bytes, or train for a while."""

import os
import time
from functools import cache
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.gradient_averaging import BATCH, WAYS, AveragedTraining, warmed_up
from benchmarks.harness.process_facts import process_facts
from common.data.synthetic import draw_sets
from common.process_group import process_group

INTERFACES = Path("/proc/self/net/dev")
TEST_IMAGES = 500


def time_steps(way: str, steps: int) -> dict:
    """Of some steps, after a warm-up: "seconds" for each backward, and the "bytes" that this rank sent for it.

    "process" says how this rank is set, see `process_facts`.
    """
    with process_group():
        step = warmed_up(way)
        sent_before = sent_bytes()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - began
        dist.barrier()  # what this rank has sent has arrived
        sent = sent_bytes() - sent_before
        backwards = steps * WAYS[way].backwards
        return {"seconds": seconds / backwards, "bytes": sent / backwards, "process": process_facts()}


def sent_bytes() -> int:
    """Bytes that this node has sent over gloo's interface, headers included; 0 where the system does not say."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if not INTERFACES.exists():
        return 0
    for line in INTERFACES.read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            # Eight numbers of what was received stand before the bytes that were sent.
            return int(counts.split()[8])
    return 0


def train(way: str, steps: int) -> dict:
    """The "start" and "end" weights as vectors, and the mean "loss" on digits that were not trained on."""
    with process_group():
        training = AveragedTraining(way)
        world_size = dist.get_world_size()
        sets = _digits(steps * world_size * BATCH)
        images, targets = _prepared(*sets["train"])
        start = _weights(training)
        for step in range(steps):
            first = (step * world_size + dist.get_rank()) * BATCH
            shard = slice(first, first + BATCH)
            # One backward a step: the shard gets the dimension that `AveragedTraining.step` expects.
            training.step(images[shard][None], targets[shard][None])
        test_images, test_targets = _prepared(*sets["test"])
        with torch.no_grad():
            loss = F.nll_loss(training.network(test_images), test_targets)
        return {"start": start, "end": _weights(training), "loss": loss.item()}


@cache  # drawing takes longer than a short training
def _digits(samples: int) -> dict[str, tuple[Tensor, Tensor]]:
    return draw_sets(0, {"train": samples, "test": TEST_IMAGES})


def _prepared(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Images of shape (N, 1, 28, 28) from 0 to 1, and labels as indices."""
    return images[:, None] / 255.0, labels.long()


def _weights(training: AveragedTraining) -> numpy.ndarray:
    vector = torch.nn.utils.parameters_to_vector(training.network.parameters())
    return vector.detach().numpy().copy()
