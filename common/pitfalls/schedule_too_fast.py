"""The scheduler stepped world-size times: the learning rate ends too early.

`prepare` takes a schedule to be written for the batches of one process, as if
the script ran on one: each call steps it once per process. A schedule written
for optimizer steps then runs out too early. Write it for the length of the
loader before `prepare`, or use `split_batches=True`, where the script's batch
is the global one and a call is a step.
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from common.accelerator import Accelerator
from common.accelerator.utils import DataLoaderConfiguration

STEPS = 8


def train(split_batches):
    loading = DataLoaderConfiguration(split_batches=split_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    model, optimizer, scheduler = prepared
    for _ in range(STEPS // 2):
        accelerator.backward(model(torch.ones(8, 4)).pow(2).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer, scheduler


def wrong():
    return train(split_batches=False)


def right():
    return train(split_batches=True)


def detect(outcome):
    optimizer, scheduler = outcome
    # AdamW counts its steps; the scheduler calls its own epochs.
    steps = max(int(state["step"]) for state in optimizer.state.values())
    moves = scheduler.scheduler.last_epoch
    if moves != steps:
        return f"the schedule has moved {moves} times in {steps} steps"
