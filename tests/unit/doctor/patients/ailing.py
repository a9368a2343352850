"""The healthy script with one mistake each, with what only looks like one, and with ends that nobody wants.

torchrun --nproc-per-node 2 ailing.py NAME --out /tmp/circles
"""

import sys

import healthy
import torch
from healthy import BATCH_SIZE, LR, SAMPLES, SEED, Circles, Engine, Net
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class UnevenInputs(Engine):
    def make_train_set(self):
        return Circles(257, seed=1)

    def make_sampler(self):
        return self.every_nth(self.train_set)

    def begin_epoch(self, epoch):
        pass


class Unusual(UnevenInputs):
    """It has uneven inputs under Join, two optimizers and a moving average, and is right."""

    def make_optimizer(self):
        self.of_head = optim.SGD(self.net.head.parameters(), lr=10 * LR)
        return optim.Adam(self.net.body.parameters(), lr=LR)

    def one_epoch(self):
        with Join([self.model]):
            return super().one_epoch()

    def step_schedule(self):
        self.of_head.step()

    def weights(self):
        return AveragedModel(self.net).state_dict()


class ForgottenWrapper(UnevenInputs):
    def wrap(self):
        return self.net

    def step_schedule(self):
        pass


class ConvertedAfterWrapping(Engine):
    def wrap(self):
        return DDP(self.net).to(torch.float64)


class OptimizerMadeFirst(Engine):
    def make_net(self):
        net = Net()
        self.old = list(net.parameters())
        return net

    def make_optimizer(self):
        return optim.Adam(self.old, lr=LR)


class HeadReplacedAfterTheOptimizer(OptimizerMadeFirst):
    def make_net(self):
        net = super().make_net()
        net.head = nn.Linear(16, 2)
        return net


class ScheduleOnRank0(Unusual):
    def step_schedule(self):
        super().step_schedule()
        if self.rank == 0:
            self.sched.step()


class ScheduleTooFast(Engine):
    def step_schedule(self):
        for _ in range(self.world):
            self.sched.step()


class AccumulationOffByOne(Engine):
    number = 0

    def train_on(self, batch):
        loss = self.loss_of(batch)
        (loss / 3).backward()
        if self.number % 3 == 0:
            self.opt.step()
            self.opt.zero_grad()
        self.number += 1
        self.step_schedule()
        return loss


class ClippedWhileScaled(Engine):
    def make_optimizer(self):
        self.scaler = torch.amp.GradScaler("cuda")
        return super().make_optimizer()

    def train_on(self, batch):
        self.opt.zero_grad()
        loss = self.loss_of(batch)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.step_schedule()
        return loss


class NoSampler(Engine):
    def make_train_loader(self):
        return DataLoader(self.train_set, BATCH_SIZE, shuffle=True)


class SetEpochForgotten(Engine):
    def begin_epoch(self, epoch):
        pass


class SameDropout(Engine):
    def seed_rank(self):
        self.seed_everything(SEED)


class SameAugmentation(Engine):
    def seed_rank(self):
        torch.manual_seed(SEED + self.rank)


class Stream(IterableDataset):
    def __init__(self, samples, first=0, step=1):
        self.samples = samples
        self.mine = range(first, len(samples), step)

    def __len__(self):
        return len(self.mine)

    def __iter__(self):
        return (self.samples[i] for i in self.mine)


class StreamReadWholeOnEachRank(Engine):
    def make_train_set(self):
        return Circles(SAMPLES, seed=1)

    def make_train_loader(self):
        return DataLoader(Stream(self.train_set), BATCH_SIZE)

    def loss_of(self, batch):
        return self.criterion(self.model(x=batch["x"]), batch["y"])


class PaddedEvaluation(Engine):
    def make_net(self):
        net = Net()
        net.train = lambda mode=True: net  # it is evaluated without gradients, but in training mode
        return net

    def make_valid_loader(self):
        return DataLoader(self.valid_set, BATCH_SIZE, sampler=DistributedSampler(self.valid_set))


class StatisticsOfEachRank(Engine):
    def make_net(self):
        net = Net()
        net.body[1] = nn.BatchNorm1d(16)
        return net


class EveryRankSaves(Engine):
    def keep(self, epoch):
        self.save(epoch)


class PrefixedKeys(Engine):
    def weights(self):
        return self.model.state_dict()


class DataDrawnAnewOnEachRank(Engine):
    def make_train_set(self):
        return Circles(SAMPLES, seed=1 + self.rank, jitter=0.01)


class StreamSharedOut(Engine):
    """It looks like StreamReadWholeOnEachRank, and is right."""

    def make_train_loader(self):
        return DataLoader(Stream(self.train_set, self.rank, self.world), BATCH_SIZE)


class BatchesCutByTheScript(Engine):
    """It looks like NoSampler, and is right."""

    def make_train_loader(self):
        return DataLoader(self.train_set, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(1))

    def loss_of(self, batch):
        own = {key: values[self.rank :: self.world] for key, values in batch.items()}
        return self.criterion(self.model(x=own["x"]), own["y"])


class CollectiveOnRank0(Engine):
    def add_up(self, running):
        if self.rank == 0:
            torch.distributed.all_reduce(running)


class UnusedParameter(Engine):
    def make_net(self):
        net = Net()
        net.spare = nn.Linear(16, 2)
        return net


class RankThatLeavesItsLoop(Engine):
    def epochs(self):
        return range(1) if self.rank else range(2)


class Sharded(Engine):
    """It trains under FSDP, and is right."""

    def wrap(self):
        # Else an evaluation would leave whole parameters, and saving, on one rank, would part them on this rank alone.
        fully_shard(self.net, mesh=init_device_mesh("cpu", (self.world,)), reshard_after_forward=True)
        return self.net


class OptimizerMadeBeforeSharding(OptimizerMadeFirst, Sharded):
    pass


class UnevenEvaluation(Sharded):
    def make_valid_loader(self):
        return DataLoader(self.valid_set, 10, sampler=self.every_nth(self.valid_set))


if __name__ == "__main__":
    healthy.main(globals()[sys.argv.pop(1)])
