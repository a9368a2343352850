"""Random small trainings: the same weights, learning rates, sync flags, losses and norms on both libraries.

A seed draws accumulation, schedulers, clipping, dropout, skipped batches, several models, who draws while data are
read, and whether the training is stopped after a checkpoint and resumed by a script that says where it goes on.
"""

import contextlib
import copy
import importlib
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tests.parity.random_scripts import Kind, choices_of, draw_from, one_of
from tests.states import OURS, THEIRS

WIDTH = 4
SCHEDULES = ["none", "step", "lambda", "one cycle", "cosine", "sequential", "chained", "plateau", "cyclic"]


@dataclass(frozen=True)
class Script:
    """The settings of a training script. The plainest script has the defaults, which are the first of the values."""

    samples: int = one_of(range(2, 26))
    batch_size: int = one_of([2, 4])  # Samples of one process.
    epochs: int = one_of([1, 2, 3])
    order: str = one_of({"sequential": 1, "seedable": 1, "shuffled": 2})
    drop_last: bool = one_of([False, True])
    split_batches: bool = one_of([False, True])
    accumulation: int = one_of([1, 2, 3, 4])
    window: str = one_of({"accumulate": 4, "no_sync": 1})
    sync_with_dataloader: bool = one_of({True: 2, False: 1})
    sync_each_batch: bool = one_of([False, True])
    adjust_scheduler: bool = one_of([True, False])
    models: int = one_of({1: 2, 2: 1})
    optimizer: str = one_of(["sgd", "adamw", "fused"])
    schedule: str = one_of(SCHEDULES)
    step_scheduler_with_optimizer: bool = one_of({True: 2, False: 1})
    clip: str = one_of(["none", "norm where it syncs", "norm", "value"])
    dropout: float = one_of([0.0, 0.5])
    precision: str = one_of({"no": 2, "bf16": 1})
    skipped: int = one_of({0: 2, 1: 1, 2: 1})  # Micro-batches that the first epoch leaves out.
    evaluates: bool = one_of([False, True])  # After each micro-batch.
    stopped_after: int | None = one_of({None: 4, 1: 1, 2: 1, 4: 1, 7: 1})  # Micro-batches. Then it stops and resumes.
    stops_within_window: bool = False  # Otherwise it stops at the end of the window of that micro-batch.
    passes_over: bool = one_of({False: 2, True: 1})  # It reads the batches that it leaves out, and drops them.
    draws: str = one_of({"nobody": 4, "data set": 4, "collator": 4, "workers": 1})  # While data are read.
    stateful: bool = False  # A resumed loader goes on by itself.


def draw(seed: int, processes: int) -> Script:
    return Script(**draw_from(choices_of(Script), random.Random(seed)))


def without_known_differences(script: Script) -> Script:
    if script.stopped_after is None or script.order == "shuffled":
        return script
    # The original draws the seed of the loader's workers once more when it resumes. Dropout and data sets draw from
    # torch's generator, whose state then differs; the collator draws from NumPy's, so it may stay. Ours:
    # `test_set_epoch_and_skip_first_batches_go_on_bit_for_bit`.
    return replace(script, dropout=0.0, draws="nobody" if script.draws == "nobody" else "collator")


class Augmented(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if random.random() < 0.5:
            x = x.flip(0)
        return x * (torch.rand(WIDTH) < 0.8), y


def masked(samples):
    x, y = default_collate(samples)
    return x * torch.from_numpy(numpy.random.randint(2, size=x.shape)), y


def new_loader(script, tensors, batch_size):
    draws = script.draws
    return DataLoader(
        Augmented(*tensors) if draws in ("data set", "workers") else TensorDataset(*tensors),
        batch_size=batch_size,
        shuffle=script.order != "sequential",
        drop_last=script.drop_last,
        collate_fn=masked if draws in ("collator", "workers") else None,
        num_workers=draws == "workers",
    )


def new_model(script):
    layers = [torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Dropout(script.dropout), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers)


def new_optimizer(script, model):
    if script.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=script.optimizer == "fused")


def rate_factor(step):
    return 1 / (1 + step)


def new_scheduler(script, optimizer):
    # More steps than a script makes on up to three processes: "one cycle" raises after its last step.
    steps = script.epochs * (script.samples + 3)
    match script.schedule:
        case "none":
            return None
        case "step":
            return lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        case "lambda":
            return lr_scheduler.LambdaLR(optimizer, rate_factor)
        case "one cycle":
            return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        case "cosine":
            return lr_scheduler.CosineAnnealingLR(optimizer, steps)
        case "sequential":
            warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=2)
            decay = lr_scheduler.ExponentialLR(optimizer, 0.9)
            return lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[2])
        case "chained":
            constant = lr_scheduler.ConstantLR(optimizer, 0.5, 3)
            return lr_scheduler.ChainedScheduler([constant, lr_scheduler.ExponentialLR(optimizer, 0.9)])
        case "plateau":
            return lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        case "cyclic":
            return lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False)


def new_accelerator(library, script, **settings):
    root = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    loading = utils.DataLoaderConfiguration(
        split_batches=script.split_batches,
        use_seedable_sampler=script.order == "seedable",
        data_seed=5,
        use_stateful_dataloader=script.stateful,
    )
    plugin = utils.GradientAccumulationPlugin(
        num_steps=script.accumulation,
        adjust_scheduler=script.adjust_scheduler,
        sync_with_dataloader=script.sync_with_dataloader,
        sync_each_batch=script.sync_each_batch,
    )
    accelerator = root.Accelerator(
        mixed_precision=script.precision,
        gradient_accumulation_plugin=plugin,
        dataloader_config=loading,
        step_scheduler_with_optimizer=script.step_scheduler_with_optimizer,
        cpu=True,
        **settings,
    )
    torch.set_num_threads(1)  # Our library has taken the threads of this rank's cores
    return accelerator


class Place(NamedTuple):
    """A place in a training: its epoch, and how many micro-batches of it are done or were skipped."""

    epoch: int
    micro_batches: int


class Training:
    """One run of a script, from its beginning or from a checkpoint.

    Attributes:
        epochs: the values that were seen in each epoch, by their names.
    """

    def __init__(self, accelerator, script):
        self.accelerator = accelerator
        self.script = script
        self.epochs: list[dict[str, list]] = []
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)
        rows = torch.randn(script.samples, WIDTH), torch.randn(script.samples, 1)
        models = [new_model(script) for _ in range(script.models)]
        optimizers = [new_optimizer(script, model) for model in models]
        schedulers = [new_scheduler(script, optimizer) for optimizer in optimizers]
        parts_of_a_batch = accelerator.num_processes if script.split_batches else 1
        loader = new_loader(script, rows, script.batch_size * parts_of_a_batch)
        evaluation = DataLoader(TensorDataset(*rows), batch_size=2 * parts_of_a_batch)
        # A scheduler may come before its optimizer: the order of the arguments has no meaning.
        prepared = iter(accelerator.prepare(*schedulers, loader, *models, evaluation, *optimizers))
        self.schedulers = [next(prepared) for _ in schedulers]
        self.loader = next(prepared)
        self.models = [next(prepared) for _ in models]
        self.evaluation = next(prepared)
        self.optimizers = [next(prepared) for _ in optimizers]

    def run(self, start: Place, folder: str, stop_after: int | None = None) -> Place | None:
        """Train from `start` to the end, or save to `folder` and stop after at least so many micro-batches.

        Returns the place of the stop, or None.
        """
        script = self.script
        computed = 0
        for epoch in range(start.epoch, script.epochs):
            done = start.micro_batches if epoch == start.epoch else 0
            seen = defaultdict(list)
            self.epochs.append(seen)
            self.loader.set_epoch(epoch)
            for number, batch in self.rest_of_epoch(done):
                ends_window = self.micro_batch(number, batch, seen)
                if script.evaluates:
                    self.evaluate(seen)
                done += 1
                computed += 1
                may_stop = script.stops_within_window or ends_window
                if stop_after is not None and computed >= stop_after and may_stop:
                    self.accelerator.save_state(folder)
                    self.accelerator.wait_for_everyone()
                    return Place(epoch, done)
        return None

    def rest_of_epoch(self, done):
        """The micro-batches of an epoch after the first `done`, counted from `done` if it reads those, else from 0."""
        if self.script.passes_over:  # The training scripts of diffusers go on like this.
            yield from itertools.islice(enumerate(self.loader), done, None)
        elif done > 0 and not self.script.stateful:
            yield from enumerate(self.accelerator.skip_first_batches(self.loader, done))
        else:
            yield from enumerate(self.loader)

    def micro_batch(self, number, batch, seen):
        """Compute a micro-batch. Returns True if it ends its window."""
        if self.script.window == "accumulate":
            # The script clips and steps in each micro-batch. The library leaves out the steps within a window.
            with self.accelerator.accumulate(*self.models):
                loss = self.forward_and_backward(batch, seen)
                self.clip_and_step(loss, seen)
            ends_window = self.accelerator.sync_gradients
        else:
            ends_window = (number + 1) % self.script.accumulation == 0
            if ends_window:
                loss = self.forward_and_backward(batch, seen)
                self.clip_and_step(loss, seen)
            else:
                with contextlib.ExitStack() as unsynced:
                    for model in self.models:
                        unsynced.enter_context(self.accelerator.no_sync(model))
                    self.forward_and_backward(batch, seen)
        seen["sync"].append(self.accelerator.sync_gradients)
        seen["skipped"].append(self.accelerator.optimizer_step_was_skipped)
        seen["rate"].append([optimizer.param_groups[0]["lr"] for optimizer in self.optimizers])
        return ends_window

    def forward_and_backward(self, batch, seen):
        x, y = batch
        prediction = sum(model(x) for model in self.models)
        loss = torch.nn.functional.mse_loss(prediction, y)
        self.accelerator.backward(loss)
        seen["loss"].append(loss.detach())
        return loss.detach()

    def clip_and_step(self, loss, seen):
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        clip = self.script.clip
        if clip == "value":
            self.accelerator.clip_grad_value_(parameters, 0.05)
        elif clip == "norm" or (clip == "norm where it syncs" and self.accelerator.sync_gradients):
            seen["norm"].append(self.accelerator.clip_grad_norm_(parameters, 0.1).clone())
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            if self.script.schedule == "plateau":
                # Ranks that follow a loss of their own drift apart, and a checkpoint holds rank 0's schedule alone.
                scheduler.step(self.accelerator.reduce(loss, "mean"))
            elif scheduler is not None:
                scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def evaluate(self, seen):
        with torch.no_grad():
            for x, _ in self.evaluation:
                seen["evaluated"].append(self.models[0](x).sum())


def run(library: str, script: Script, folder: str, seen: dict[str, Any], **settings: Any) -> None:
    """Note what a training sees in each epoch, its weights and its optimizers' states."""
    accelerator = new_accelerator(library, script, **settings)
    training = Training(accelerator, script)
    seen["epochs"] = training.epochs
    stop = training.run(Place(0, script.skipped), folder, script.stopped_after)
    if stop is not None:
        accelerator.free_memory()
        training = Training(accelerator, script)
        seen["resumed"] = training.epochs
        torch.rand(7)  # Another process would have drawn other numbers.
        accelerator.load_state(folder)
        training.run(stop, folder)
    weights = [accelerator.unwrap_model(model).state_dict() for model in training.models]
    states = [optimizer.state_dict()["state"] for optimizer in training.optimizers]
    seen |= copy.deepcopy({"weights": weights, "states": states})


TRAININGS = Kind(OURS, THEIRS, draw, without_known_differences, run)
