"""Prepare a script's objects for several ranks.

A script for one device makes a network, an optimizer and loaders. An Accelerator's `prepare` turns them into those of
one rank, so that the training loop can stay as it is. Write

    prepare(*objects) -> list

A process group exists. The prepared objects are returned in the order in which they came:

- A network (nn.Module) comes back in DistributedDataParallel. That gives all ranks the weights of rank 0, and averages
  the gradients in backward.
- An optimizer comes back as it is. It was made from the network's parameters, and DDP trains these very parameters.
- A DataLoader comes back as a loader of this rank's share. The `batch_size` of the original one counts the samples of
  all ranks together. The number of ranks divides it, and it divides the length of the dataset. In each step the ranks
  together have the samples of one batch of the original loader, each sample on one rank, and no rank reads another
  rank's samples from the dataset. Batches are made by the loader's own `collate_fn`. Where the loader shuffles (its
  `sampler` is a RandomSampler), all ranks share out one shuffled order. The order may be the same in each epoch,
  because this training loop does not call `set_epoch` (the loop of level 02 does). The ranks' random generators have
  different seeds.

torch.utils.data.DistributedSampler deals out the samples of a dataset; it need not be given rank and world size.

    python -m common.ladder check prepare my_prepare.py
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def prepare(*objects: Any) -> list[Any]:
    """The objects of a training for this rank, in the same order."""
    return [prepare_one(obj) for obj in objects]


def prepare_one(obj: Any) -> Any:
    if isinstance(obj, nn.Module):
        raise NotImplementedError("wrap the network")
    if isinstance(obj, DataLoader):
        raise NotImplementedError("make a loader of this rank's share")
    if isinstance(obj, Optimizer):
        raise NotImplementedError("return the optimizer, which has the right parameters already")
    return obj
