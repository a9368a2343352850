"""Gradient accumulation off by one: a step too early, and a rest without one.

`number % 4 == 0` is true for micro-batch 0. The windows are then 1, 4, 4 … with
an incomplete rest whose gradients are thrown away or leak into the next epoch.
Count from 1, and close the last window where the data end.
`accelerator.accumulate` does both, and so does the Trainer.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LEVELS = ("03_accelerate",)
WORLD_SIZE = 2
SYMPTOM = "silent"
MICRO_BATCHES = torch.ones(8, 2, 4)
PER_STEP = 4


def count_windows(model, optimizer):
    """The number of micro-batches of each step, in a list that keeps up."""
    windows = [0]

    def count(_):
        windows[-1] += 1

    trained = (p for p in model.parameters() if p.requires_grad)
    next(trained).register_hook(count)
    optimizer.register_step_post_hook(lambda *_: windows.append(0))
    return windows


def train(is_last):
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = count_windows(model, optimizer)
    for number, inputs in enumerate(MICRO_BATCHES):
        with nullcontext() if is_last(number) else model.no_sync():
            (model(inputs).pow(2).mean() / PER_STEP).backward()
        if is_last(number):
            optimizer.step()
            optimizer.zero_grad()
    return windows


def wrong():
    return train(lambda number: number % PER_STEP == 0)


def right():
    return train(lambda number: (number + 1) % PER_STEP == 0)


def detect(windows):
    *steps, rest = windows  # the last step may be short, where the data end
    whole = all(size == PER_STEP for size in steps[:-1])
    if rest or not whole or max(steps, default=0) > PER_STEP:
        sizes = " and ".join(map(str, steps))
        return f"steps of {sizes} micro-batches, {rest} without a step"


def measure(windows):
    return f"steps of {' + '.join(map(str, windows[:-1]))} batches"
