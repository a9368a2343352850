"""`module.` in front of every key: `strict=False` loads nothing of them.

The wrapper's state dict has the wrapper's names. Loaded into the bare network
it is an error; the quick cure `strict=False` drops that error together with
every weight, and the network stays as it was drawn. Save
`model.module.state_dict()`, or what `unwrap_model` returns.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls.stage import scratch

LEVELS = ("01_data_parallel", "02_ddp_raw", "03_accelerate")
WORLD_SIZE = 2
SYMPTOM = "silent"


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def save_and_load(state):
    path = scratch() / "weights.pt"
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    model = network()
    loaded = torch.load(path, weights_only=True)
    return model, model.load_state_dict(loaded, strict=False)


def wrong():
    model = DistributedDataParallel(network())
    return save_and_load(model.state_dict())


def right():
    model = DistributedDataParallel(network())
    return save_and_load(model.module.state_dict())


def detect(outcome):
    _, left_out = outcome
    if left_out.missing_keys:
        instead = f"the file has {', '.join(left_out.unexpected_keys)}"
        return f"not loaded: {', '.join(left_out.missing_keys)}; {instead}"


def measure(outcome):
    model, left_out = outcome
    names = model.state_dict().keys()
    return f"{len(names) - len(left_out.missing_keys)} of {len(names)} loaded"
