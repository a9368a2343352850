"""Train a little classifier of noisy circles on several workers.

    torchrun --nproc-per-node 2 healthy.py --out /tmp/circles

Nothing here knows of the repository: it is the patient that the doctor's tests examine. `ailing.py` overrides
single methods of it.
"""

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
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2
SAMPLES = 256
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
    def __init__(self, width: int = 16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x.to(self.head.weight.dtype)))


class Engine:
    def __init__(self, out):
        self.out = out
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.seed_everything(SEED)
        self.train_set = self.make_train_set()
        self.valid_set = Circles(101, seed=2)
        self.sampler = self.make_sampler()
        self.train_loader = self.make_train_loader()
        self.valid_loader = self.make_valid_loader()
        self.net = self.make_net()
        self.model = self.wrap()
        self.opt = self.make_optimizer()
        steps = EPOCHS * len(self.train_loader)
        self.sched = optim.lr_scheduler.LambdaLR(self.opt, lambda step: max(0.0, 1.0 - step / (steps + 1)))
        self.criterion = nn.CrossEntropyLoss()
        self.seed_rank()

    def make_train_set(self):
        return Circles(SAMPLES, seed=1, jitter=0.01)

    def make_sampler(self):
        return DistributedSampler(self.train_set, self.world, self.rank, shuffle=True, seed=SEED)

    def make_train_loader(self):
        return DataLoader(self.train_set, BATCH_SIZE, sampler=self.sampler)

    def make_valid_loader(self):
        return DataLoader(self.valid_set, BATCH_SIZE, sampler=self.every_nth(self.valid_set))

    def every_nth(self, dataset):
        return range(self.rank, len(dataset), self.world)

    def make_net(self):
        return Net()

    def wrap(self):
        return DDP(self.net)

    def make_optimizer(self):
        return optim.Adam(self.model.parameters(), lr=LR)

    def seed_rank(self):
        self.seed_everything(SEED + self.rank)

    @staticmethod
    def seed_everything(seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def epochs(self):
        return range(EPOCHS)

    def fit(self):
        for epoch in self.epochs():
            self.begin_epoch(epoch)
            running = self.one_epoch()
            loss = self.validate()
            self.add_up(running)
            if self.rank == 0:
                print(f"[{epoch}] train {running.item() / self.world:.4f} valid {loss:.4f}")
            self.keep(epoch)

    def begin_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def one_epoch(self):
        self.model.train()
        running = torch.zeros(())
        for batch in self.train_loader:
            loss = self.train_on(batch)
            running += loss.detach() / len(self.train_loader)
        return running

    def train_on(self, batch):
        self.opt.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()
        self.step_schedule()
        return loss

    def loss_of(self, batch):
        return self.criterion(self.model(batch["x"]), batch["y"])

    def step_schedule(self):
        self.sched.step()

    def add_up(self, running):
        torch.distributed.all_reduce(running)

    def validate(self):
        self.model.eval()
        counts = torch.zeros(2)
        with torch.inference_mode():
            for batch in self.valid_loader:
                scores = self.net(batch["x"])
                counts[0] += nn.functional.cross_entropy(scores, batch["y"], reduction="sum")
                counts[1] += batch["y"].numel()
        torch.distributed.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    def keep(self, epoch):
        if self.rank == 0:
            self.save(epoch)

    def save(self, epoch):
        torch.save({"weights": self.weights(), "epoch": epoch}, self.out / "last.pt")

    def weights(self):
        return self.net.state_dict()


def main(engine=Engine):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    out = parser.parse_args().out
    torch.distributed.init_process_group("gloo")
    engine(out).fit()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
