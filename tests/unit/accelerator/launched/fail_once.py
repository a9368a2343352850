"""Two ranks, of which the second one ends between two all-reduces of the first attempt."""

import os

import torch
import torch.distributed as dist

from common.accelerator import PartialState

state = PartialState()
ones = torch.ones(1)
dist.all_reduce(ones)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and state.process_index == 1:
    os._exit(1)
dist.all_reduce(ones)
os.write(1, f"sum={ones.item()} ".encode())
state.destroy_process_group()
