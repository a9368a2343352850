"""Train a little classifier of noisy circles on several workers.

    torchrun --nproc-per-node 2 patient.py --out /tmp/circles

Nothing here knows of the repository. The doctor's tests examine it, whole and with the changes of `ailments.py`.
"""

import argparse
import math
import pathlib
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2
BATCH_SIZE = 16
LR = 3e-3
SEED = 7


class Circles(Dataset):
    def __init__(self, count: int, seed: int, jitter: float = 0.0):
        generator = torch.Generator().manual_seed(seed)
        radius = torch.rand(count, generator=generator)
        angle = 2 * math.pi * torch.rand(count, generator=generator)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.inside = (radius < 0.5).long()
        self.jitter = jitter

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        point = self.points[i]
        if self.jitter:
            point = point + self.jitter * torch.from_numpy(np.random.randn(2)).float()
        return {"x": point, "y": self.inside[i]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.body(x.to(self.head.weight.dtype)))


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    seed_everything(SEED)

    train_set = Circles(256, seed=1, jitter=0.01)
    valid_set = Circles(101, seed=2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler)
    valid_loader = DataLoader(valid_set, BATCH_SIZE, sampler=range(rank, len(valid_set), world))

    net = Net()
    model = DDP(net)
    opt = optim.Adam(net.parameters(), lr=LR)
    steps = EPOCHS * len(train_loader)
    sched = optim.lr_scheduler.LambdaLR(opt, lambda step: max(0.0, 1.0 - step / (steps + 1)))
    criterion = nn.CrossEntropyLoss()
    seed_everything(SEED + rank)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(())
        for batch in train_loader:
            opt.zero_grad()
            loss = criterion(model(batch["x"]), batch["y"])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            sched.step()
            running += loss.detach() / len(train_loader)

        model.eval()
        counts = torch.zeros(2)
        with torch.inference_mode():
            for batch in valid_loader:
                counts[0] += nn.functional.cross_entropy(net(batch["x"]), batch["y"], reduction="sum")
                counts[1] += batch["y"].numel()
        dist.all_reduce(counts)
        dist.all_reduce(running)

        if rank == 0:
            print(f"[{epoch}] train {running.item() / world:.4f} valid {(counts[0] / counts[1]).item():.4f}")
            torch.save({"weights": net.state_dict(), "epoch": epoch}, out / "last.pt")
    del model  # before its group: a DDP that is freed after it may hang (torch 2.11)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    main(parser.parse_args().out)
