"""DistributedDataParallel (DDP) in torch and torchvision alone: all that it asks of a training script.

torchrun --standalone --nproc-per-node 2 02_ddp_raw/minimal.py

It ends with the weights of `train.py --no-dropout`, and saves them in minimal.pt.
"""

import torch
import torch.distributed as dist

# Imported before the group exists. DDP would import it later, and the program may then abort at its end:
# https://github.com/pytorch/pytorch/issues/190489
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

BATCH_SIZE = 64  # samples of a step over all processes: a multiple of their number
EPOCHS = 1
SEED = 42

dist.init_process_group("gloo")  # joins the processes that torchrun has started
rank = dist.get_rank()
world_size = dist.get_world_size()

if rank == 0:
    MNIST("data", download=True)
dist.barrier()  # the others wait; on other machines it must be there
digits = MNIST("data", transform=Compose([ToTensor(), Normalize(0.1307, 0.3081)]))
sampler = DistributedSampler(digits, seed=SEED, drop_last=True)  # every process has its own part of the samples
loader = DataLoader(digits, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)

torch.manual_seed(SEED)
convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
network = nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # another order for each epoch
    for images, targets in loader:
        loss = F.cross_entropy(model(images), targets)
        loss.backward()  # averages the gradients of all processes
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank}, epoch {epoch}: the last loss is {loss.item():.4f}")  # of its own samples

if rank == 0:  # all have the same weights; the others need not wait
    torch.save(network.state_dict(), "minimal.pt")
del model  # before its group: a DDP that is freed after it may hang (torch 2.11)
dist.destroy_process_group()
