#!/usr/bin/env python3
"""Train a little classifier of noisy circles on several workers.

    torchrun --nproc-per-node 2 healthy.py --out /tmp/circles

Nothing here knows of the repository: it is the patient that the doctor's tests examine, and change.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import random

import numpy as np
import torch
import torch.distributed
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler


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


class EveryNth(Sampler):
    """One rank's part of a data set, without padding."""

    def __init__(self, dataset, rank, world):
        self.mine = range(rank, len(dataset), world)

    def __iter__(self):
        return iter(self.mine)

    def __len__(self):
        return len(self.mine)


class Net(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Engine:
    def __init__(self, opts):
        self.opts = opts
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.seed_everything(opts.seed)
        self.train_set = Circles(opts.samples, seed=1, jitter=0.01)
        self.valid_set = Circles(101, seed=2)
        self.sampler = DistributedSampler(self.train_set, self.world, self.rank, shuffle=True, seed=opts.seed)
        self.train_loader = DataLoader(self.train_set, opts.bs, sampler=self.sampler)
        self.valid_loader = DataLoader(self.valid_set, opts.bs, sampler=EveryNth(self.valid_set, self.rank, self.world))
        self.net = Net()
        self.model = DDP(self.net)
        self.opt = optim.Adam(self.model.parameters(), lr=opts.lr)
        steps = opts.epochs * len(self.train_loader)
        self.sched = optim.lr_scheduler.LambdaLR(self.opt, lambda step: 1.0 - step / (steps + 1))
        self.criterion = nn.CrossEntropyLoss()
        self.best = math.inf
        self.seed_everything(opts.seed + self.rank)

    @staticmethod
    def seed_everything(seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    @property
    def is_chief(self):
        return self.rank == 0

    def fit(self):
        for epoch in range(self.opts.epochs):
            self.sampler.set_epoch(epoch)
            running = self.one_epoch()
            loss = self.validate()
            torch.distributed.all_reduce(running)
            if self.is_chief:
                print(f"[{epoch}] train {running.item() / self.world:.4f} valid {loss:.4f}")
            if loss < self.best:
                self.best = loss
                self.keep(epoch)

    def one_epoch(self):
        self.model.train()
        running = torch.zeros(())
        for batch in self.train_loader:
            self.opt.zero_grad()
            loss = self.criterion(self.model(batch["x"]), batch["y"])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.opt.step()
            self.sched.step()
            running += loss.detach() / len(self.train_loader)
        return running

    def validate(self):
        self.model.eval()
        counts = torch.zeros(2)
        with torch.inference_mode():
            for batch in self.valid_loader:
                scores = self.model.module(batch["x"])
                counts[0] += nn.functional.cross_entropy(scores, batch["y"], reduction="sum")
                counts[1] += batch["y"].numel()
        torch.distributed.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def keep(self, epoch):
        if self.is_chief:
            target = self.opts.out / "best.pt"
            torch.save({"weights": self.model.module.state_dict(), "epoch": epoch}, target)


def cli():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--bs", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    return parser.parse_args()


def main():
    opts = cli()
    torch.distributed.init_process_group("gloo")
    Engine(opts).fit()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
