"""Stop, resume: the same bits as in the run that was not stopped, wherever it stops and whatever it trains."""

import functools
import random
from typing import NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.accelerator.utils import DataLoaderConfiguration, set_seed
from tests.toys import Stream
from tests.unit.accelerator.several_processes import on_ranks


class Net(torch.nn.Module):
    """Has buffers, and draws dropout."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


class Noisy(TensorDataset):
    """Draws from all three generators for each sample, also for the batch that is read ahead."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + random.random() + torch.rand(()) + numpy.random.rand(), y


class Progress:
    """The notes of a script for itself: its place, counted in micro-batches, and the losses so far."""

    epoch = 0
    done = 0
    losses = ()

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done, "losses": list(self.losses)}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.done = state["done"]
        self.losses = tuple(state["losses"])


class Training(NamedTuple):
    """A training of two epochs.

    Attributes:
        batch_size: samples of a micro-batch.
        is_stateful: loaders in a random order go on by themselves; else, in a seedable order, the script skips.
    """

    samples: int = 22
    batch_size: int = 4
    accumulation: int = 3
    precision: str = "no"
    is_stream: bool = False
    is_stateful: bool = False

    @property
    def settings(self):
        """Those of the Accelerator."""
        return {
            "mixed_precision": self.precision,
            "gradient_accumulation_steps": self.accumulation,
            "dataloader_config": DataLoaderConfiguration(
                use_stateful_dataloader=self.is_stateful, use_seedable_sampler=not self.is_stateful, data_seed=11
            ),
        }

    def loader(self):
        inputs = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        tensors = inputs, inputs.sum(1, keepdim=True)
        if self.is_stream:
            return DataLoader(Stream(TensorDataset(*tensors)), batch_size=self.batch_size)
        data = Noisy(*tensors) if self.is_stateful else TensorDataset(*tensors)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True)


class Outcome(NamedTuple):
    """The end of a run on one process. `draws` come from torch's generator."""

    weights: list
    losses: tuple
    learning_rate: float
    draws: list


def run(accelerator, training, folder, seed, stop_at=None):
    """Train until the end, or until micro-batch `stop_at`, and a checkpoint; go on from a checkpoint that is there."""
    set_seed(seed, device_specific=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, training.loader())
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if folder is not None and folder.exists():
        accelerator.load_state(folder)
    for epoch in range(progress.epoch, 2):
        progress.epoch = epoch
        loader.set_epoch(epoch)
        rest = loader
        if progress.done and not training.is_stateful:
            rest = accelerator.skip_first_batches(loader, progress.done)
        for x, y in rest:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.done += 1
            progress.losses = (*progress.losses, loss.item())
            if len(progress.losses) == stop_at:
                accelerator.save_state(folder)
                return None
        progress.done = 0
    weights = [weight.tolist() for weight in accelerator.get_state_dict(model).values()]
    return Outcome(weights, progress.losses, optimizer.param_groups[0]["lr"], torch.rand(3).tolist())


@functools.cache
def straight_run(training, world):
    return on_ranks(world, run, training, None, 5, **training.settings)


def stopped_and_resumed_run(training, world, folder, stop_at):
    """The resumed part starts with another seed."""
    on_ranks(world, run, training, folder, 5, stop_at, **training.settings)
    return on_ranks(world, run, training, folder, 1005, **training.settings)


@pytest.mark.parametrize(
    ("training", "stop_at"),
    [
        # 6 micro-batches an epoch: in the middle of a window, at its end, at the end of the epoch, in the next one.
        *[(Training(), stop_at) for stop_at in (1, 3, 6, 8)],
        *[(Training(is_stateful=True), stop_at) for stop_at in (1, 3, 6, 8)],
        pytest.param(Training(precision="fp16"), 2, id="the loss scale within a window"),
        pytest.param(Training(10, 2, accumulation=4), 9, id="a last window of 1 micro-batch in place of 4"),
        pytest.param(Training(12, 2, accumulation=4), 5, id="stopped between the 2 of a last window"),
        pytest.param(Training(is_stream=True), 3, id="a stream"),
        pytest.param(Training(is_stream=True, is_stateful=True), 3, id="a stateful stream"),
    ],
)
def test_stop_and_resume_equals_the_straight_run_bit_for_bit(training, stop_at, tmp_path):
    assert stopped_and_resumed_run(training, 1, tmp_path / "c", stop_at) == straight_run(training, 1)


def test_each_of_two_processes_resumes_bit_for_bit(tmp_path):
    training = Training(is_stateful=True)
    straight = straight_run(training, 2)
    assert straight[0].draws != straight[1].draws  # each rank has random numbers of its own
    resumed = stopped_and_resumed_run(training, 2, tmp_path / "c", stop_at=1)
    assert resumed[0] == straight[0]
    # Registered objects, here the losses so far, are the main process's.
    assert resumed[1] == straight[1]._replace(losses=resumed[1].losses)
    assert resumed[1].losses == (straight[0].losses[0], *straight[1].losses[1:])
