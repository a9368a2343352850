"""A parameter that the forward does not use: DDP waits for its gradient.

The all-reduce of a bucket starts when the last gradient in it is there. One
that never comes leaves the reduction unfinished, and the next forward raises.
Freeze or remove what is not used before wrapping. Where the unused parameters
change from step to step, `find_unused_parameters=True` searches the graph for
them, each time.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.spare_head = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(inputs)


def train(model):
    """Two steps, and the error that ends the second one."""
    loss(model).backward()
    try:
        loss(model).backward()
    except RuntimeError as error:
        return model, error
    return model, None


def loss(model):
    return model(torch.ones(8, 4)).pow(2).mean()


def wrong():
    model = TwoHeads()
    return train(DistributedDataParallel(model))


def right():
    model = TwoHeads()
    model.spare_head.requires_grad_(False)
    return train(DistributedDataParallel(model))


def detect(outcome):
    """Call it between backward and `zero_grad`; it needs no error."""
    model, error = outcome
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    unused = [name for name, p in trained.items() if p.grad is None]
    if unused:
        raised, _, _ = str(error).partition(". ")
        return f"no gradient after backward: {', '.join(unused)}; {raised}"
