"""Gradient accumulation off by one: a step too early, and none for the rest.

`number % 4 == 0` is true for micro-batch 0. The windows are then 1, 4, 4 … with
an incomplete rest whose gradients are thrown away or leak into the next epoch.
Count from 1, and close the last window where the data end. The gradient of a
shorter window is then too small, because it too is divided by 4, but it is not
lost. `accelerator.accumulate` does both, and so does the Trainer.
"""

import torch
from torch import nn

MICRO_BATCHES = torch.ones(8, 2, 4)
PER_STEP = 4


def train(is_last):
    """The number of micro-batches in each step, and then of those in none."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = [0]
    for number, inputs in enumerate(MICRO_BATCHES):
        (model(inputs).pow(2).mean() / PER_STEP).backward()
        windows[-1] += 1
        if is_last(number):
            optimizer.step()
            optimizer.zero_grad()
            windows.append(0)
    return windows


def wrong():
    return train(lambda number: number % PER_STEP == 0)


def right():
    def closes(number):
        seen = number + 1
        return seen % PER_STEP == 0 or seen == len(MICRO_BATCHES)

    return train(closes)


def detect(windows):
    *steps, rest = windows  # the last step may be short, where the data end
    whole = all(size == PER_STEP for size in steps[:-1])
    if rest or not whole or max(steps, default=0) > PER_STEP:
        sizes = " and ".join(map(str, steps))
        return f"steps of {sizes} micro-batches, {rest} without a step"
