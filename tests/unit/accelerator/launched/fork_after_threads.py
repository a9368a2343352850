"""A notebook's cells: OpenMP computes on several threads here, and then in two processes that are forked."""

import os

import torch

from common.accelerator.launchers import debug_launcher
from common.accelerator.state import PartialState


def work() -> int:
    weights = torch.randn(600, 600, requires_grad=True)
    (weights @ weights).exp().sum().backward()
    torch.nn.functional.conv2d(torch.randn(4, 8, 64, 64), torch.randn(8, 8, 3, 3)).sum()
    return torch.get_num_threads()


def train() -> None:
    PartialState()
    torch.set_num_threads(4)
    os.write(1, f"threads {work()}\n".encode())


os.sched_getaffinity = lambda pid: set(range(16))  # As on a machine with many cores.
torch.set_num_threads(4)
print("before", work(), flush=True)
debug_launcher(train, num_processes=2)
print("after", work())
