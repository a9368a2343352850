"""Some steps of a network on one rank, in the way of one level: the jobs of `benchmarks.your_network.measure`."""

import contextlib
import copy
import functools
import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from benchmarks.your_network import spec, training
from benchmarks.your_network.spec import UserNetwork
from common.cores import confine_to_device, threads_per_worker
from common.process_group import process_group
from common.small.data_parallel import EmulatedDataParallel


@dataclass(frozen=True)
class Work:
    """What all levels have in common.

    Attributes:
        spec, shape, optimizer: as `spec.load` takes them.
        batch: the global one.
        cores_per_device: None where the devices are GPUs.
    """

    spec: str
    shape: tuple[int, ...] | None
    optimizer: str
    batch: int
    cores_per_device: int | None


class Clock:
    """Times the steps after a warm-up, between two moments at which the device has done all its work."""

    def __init__(self, device: torch.device, warm_up: int, steps: int) -> None:
        self.device = device
        self.warm_up = warm_up
        self.all_steps = warm_up + steps
        self.done = 0
        self.began = 0.0
        self.seconds = 0.0  # of one step

    def count(self) -> None:
        """A step has ended."""
        self.done += 1
        if self.done in (self.warm_up, self.all_steps) and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        if self.done == self.warm_up:
            self.began = time.perf_counter()
        if self.done == self.all_steps:
            self.seconds = (time.perf_counter() - self.began) / (self.all_steps - self.warm_up)


@dataclass(frozen=True)
class Training:
    """A training of this rank, of as many steps as its clock counts.

    Attributes:
        model: on the CPU.
        batch: this rank's share of the global one, which every step moves to the device.
        devices: of all ranks, or of the replicas.
    """

    network: UserNetwork
    model: nn.Module
    batch: tuple[Any, Any]
    device: torch.device
    devices: int
    clock: Clock


def time_steps(work: Work, level: str, devices: int, warm_up: int, steps: int) -> float:
    """Seconds of a step, after a warm-up, with this rank's share of the batch."""
    device = _take_device(work)
    network = _network(work)
    share = work.batch // int(os.environ["WORLD_SIZE"])
    batch = training.make_batch(network, share)
    clock = Clock(device, warm_up, steps)
    LEVELS[level](Training(network, copy.deepcopy(_model(work)), batch, device, devices, clock))
    return clock.seconds


def _take_device(work: Work) -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    if work.cores_per_device is None:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    confine_to_device(local_rank, work.cores_per_device)
    torch.set_num_threads(threads_per_worker(int(os.environ["WORLD_SIZE"])))
    return torch.device("cpu")


@functools.lru_cache(maxsize=1)
def _network(work: Work) -> UserNetwork:
    """The network, whose file is run once, and not for every sample."""
    return spec.load(work.spec, work.shape, work.optimizer)


@functools.lru_cache(maxsize=1)
def _model(work: Work) -> nn.Module:
    """The module, from which every level gets a copy: to draw weights takes longer than to copy them."""
    return training.build(_network(work))


def raw_loop(run: Training) -> None:
    model = run.model.to(run.device)
    _loop(run, model, _optimizer(run, model))


def data_parallel(run: Training) -> None:
    """DataParallel: torch's, or, without GPUs, replicas on threads."""
    model = run.model.to(run.device)
    optimizer = _optimizer(run, model)
    if run.device.type == "cuda":
        _loop(run, nn.DataParallel(model, device_ids=list(range(run.devices))), optimizer)
    else:
        _loop(run, EmulatedDataParallel(model, run.devices), optimizer)


def ddp(run: Training) -> None:
    model = run.model.to(run.device)
    with process_group("gloo" if run.device.type == "cpu" else "nccl"):
        _loop(run, DistributedDataParallel(model), _optimizer(run, model))


def core(run: Training) -> None:
    from common.accelerator import Accelerator

    accelerator = Accelerator(cpu=run.device.type == "cpu")
    model, optimizer = accelerator.prepare(run.model, _optimizer(run, run.model))
    _loop(run, model, optimizer, accelerator.backward)
    accelerator.end_training()


def trainer(run: Training) -> None:
    from common.trainer import Trainer, TrainerCallback, TrainingArguments

    inputs, targets = run.batch

    class OwnTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return training.loss_of(run.network, model, (inputs["inputs"], inputs["targets"]))

    class Counting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            run.clock.count()

    def collate(_: Sequence[int]) -> dict[str, Any]:
        return {"inputs": inputs, "targets": targets}

    # The summary that a Trainer prints at its end belongs to no table.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,  # the collator makes the batch out of any sample
            max_steps=run.clock.all_steps,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,  # no other level pins
            ddp_find_unused_parameters=False,
            use_cpu=run.device.type == "cpu",
        )
        # As many samples as the steps need. What they are does not matter: the collator has the batch.
        samples = range(run.clock.all_steps * run.devices)
        optimizers = (_optimizer(run, run.model), None)
        own = OwnTrainer(run.model, arguments, collate, samples, callbacks=[Counting()], optimizers=optimizers)
        own.train()
    own.end()


LEVELS = {"00": raw_loop, "01": data_parallel, "02": ddp, "03": core, "04": trainer}


def _optimizer(run: Training, model: nn.Module) -> torch.optim.Optimizer:
    return training.make_optimizer(run.network, training.trained(model))


def _loop(
    run: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    """The raw loop, which all levels but the Trainer's have."""
    while run.clock.done < run.clock.all_steps:
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(run.device), run.batch)
        backward(training.loss_of(run.network, model, batch))
        optimizer.step()
        optimizer.zero_grad()
        run.clock.count()
