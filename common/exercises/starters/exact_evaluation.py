"""Evaluate exactly on any number of ranks.

Every rank has the same network and the same list of samples, each a pair of an image and a label. Write

    accuracy(model, dataset) -> float

It returns the fraction of all samples for which `model(images).argmax(dim=1)` is the label, and the same number on
every rank. `images` is a batch: `image[None]` makes a batch of one. Each rank runs the network on its own share of the
samples. No sample is run twice, and none is left out, whether or not their number divides by the number of ranks.
There may be fewer samples than ranks.

    python -m common.ladder check exact_evaluation my_exact_evaluation.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def accuracy(model: nn.Module, dataset: list[tuple[Tensor, int]]) -> float:
    """The fraction of right answers over the shares of all ranks."""
    raise NotImplementedError("count right answers in this rank's share, and add up the counts of all ranks")
