"""`module.` in front of every key: with `strict=False` none is loaded.

The wrapper's state dict has the wrapper's names. Loaded into the bare network
it is an error; the quick cure `strict=False` drops that error together with
every weight, and the network stays as it was drawn. Save
`model.module.state_dict()`, or what `unwrap_model` returns.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def wrong():
    model = DistributedDataParallel(network())
    saved = model.state_dict()
    return network().load_state_dict(saved, strict=False)


def right():
    model = DistributedDataParallel(network())
    saved = model.module.state_dict()
    return network().load_state_dict(saved, strict=False)


def detect(left_out):
    """`left_out` is what `load_state_dict` has returned."""
    if left_out.missing_keys:
        instead = f"the file has {', '.join(left_out.unexpected_keys)}"
        return f"not loaded: {', '.join(left_out.missing_keys)}; {instead}"
