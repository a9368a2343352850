"""The same seed on all ranks: they drop and augment alike.

One seed everywhere is right for the weights and the sample order, which the
ranks share. Dropout and augmentation are each rank's own. A single process
draws other numbers for each sample of a batch. W ranks with equal generators
draw the same numbers W times, and the noise that should average out is in every
gradient. Seed with `seed + rank` once the model is built.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.process_group import all_gather_object

SEED = 42


def wrong():
    torch.manual_seed(SEED)
    return F.dropout(torch.ones(64))


def right():
    torch.manual_seed(SEED + dist.get_rank())
    return F.dropout(torch.ones(64))


def detect(_):
    """Call it once the model is built, or in the middle of training."""
    states = all_gather_object(torch.get_rng_state().numpy().tobytes())
    for rank, state in enumerate(states):
        first = states.index(state)
        if first < rank:
            return f"rank {rank} draws the random numbers of rank {first}"
