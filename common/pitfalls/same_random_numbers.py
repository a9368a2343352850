"""The same seed on all ranks: they drop and augment alike.

One seed everywhere is right for the weights and the sample order, which the
ranks share. Dropout and augmentation are each rank's own: drawn from equal
generators, W ranks bring one mask where a single process would have drawn W,
and the noise that should average out is in every gradient. Seed with `seed +
rank` once the model is built.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.process_group import all_gather_object

LEVELS = ("02_ddp_raw", "03_accelerate")
WORLD_SIZE = 3
SYMPTOM = "silent"
SEED = 42


def augment_and_drop():
    shift = torch.randint(-2, 3, (2,))  # pixels, down and right
    image = torch.arange(1.0, 65.0).view(8, 8)
    return F.dropout(image.roll(shift.tolist(), dims=(0, 1)), p=0.5)


def wrong():
    torch.manual_seed(SEED)
    return augment_and_drop()


def right():
    torch.manual_seed(SEED + dist.get_rank())
    return augment_and_drop()


def detect(_):
    """To be called once the model is built, or in the middle of training."""
    states = all_gather_object(torch.get_rng_state().numpy().tobytes())
    for rank, state in enumerate(states):
        if (first := states.index(state)) < rank:
            return f"rank {rank} draws the random numbers of rank {first}"


def measure(image):
    views = {str(view) for view in all_gather_object(image.tolist())}
    return f"distinct views: {len(views)} of {dist.get_world_size()}"
