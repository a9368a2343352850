"""Parameters replaced after the optimizer was made: it trains the old ones.

Exchanging the last layer for a new task makes new tensors, and so does a
wrapper that flattens parameters. An optimizer keeps those it was given; the new
layer gets gradients and never moves. DDP keeps the parameters that it wraps, so
an optimizer may be made before it. To make the optimizer last is always right.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model, optimizer):
    for _ in range(5):
        model(torch.ones(8, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def wrong():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(4, 2)  # two classes instead of ten
    return train(DistributedDataParallel(model), optimizer)


def right():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 10))
    model[1] = nn.Linear(4, 2)
    model = DistributedDataParallel(model)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def detect(outcome):
    model, optimizer = outcome
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    forgotten = [name for name, p in trained.items() if id(p) not in held]
    if forgotten:
        return f"no optimizer has {', '.join(forgotten)}"
