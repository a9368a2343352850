"""Jobs of one rank for `benchmarks.your_network.measure`: some steps of a network, trained in one level's way."""

import contextlib
import copy
import functools
import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from benchmarks.your_network import spec, training
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Replicated
from common.cores import confine_thread_to_device, confine_to_device, threads_per_worker
from common.process_group import process_group

RAW = "00"
REPLICATED = "01"
DDP = "02"
CORE = "03"
TRAINER = "04"


@dataclass(frozen=True)
class Work:
    """What all contestants have in common.

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

    def network(self) -> UserNetwork:
        return spec.load(self.spec, self.shape, self.optimizer)


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


def time_steps(work: Work, level: str, devices: int, warm_up: int, steps: int) -> float:
    """Seconds of a step, after a warm-up, with this rank's share of the batch."""
    device = _take_device(work)
    model = copy.deepcopy(_model(work))
    network = work.network()
    clock = Clock(device, warm_up, steps)
    share = work.batch if level in (RAW, REPLICATED) else work.batch // devices
    batch = training.make_batch(network, share)
    match level:
        case "00" | "01":
            model = model.to(device) if level == RAW else _replicated(model, device, devices)
            _loop(network, model, device, batch, clock)
        case "02":
            with process_group("gloo" if device.type == "cpu" else "nccl"):
                _loop(network, DistributedDataParallel(model.to(device)), device, batch, clock)
        case "03":
            _core(network, model, device, batch, clock)
        case "04":
            _trainer(network, model, device, batch, clock)
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
def _model(work: Work) -> nn.Module:
    """The network, from which every contestant gets a copy: to draw weights takes longer than to copy them."""
    return training.build(work.network())


def _replicated(model: nn.Module, device: torch.device, devices: int) -> nn.Module:
    """DataParallel: torch's, or, without GPUs, replicas on threads, each on the cores of its device."""
    if device.type == "cuda":
        return nn.DataParallel(model.to(device), device_ids=list(range(devices)))

    def take_cores(number: int) -> None:
        confine_thread_to_device(number)
        torch.set_num_threads(threads_per_worker(devices))

    threads = []
    for number in range(devices):
        threads.append(ThreadPoolExecutor(1, "replica", initializer=take_cores, initargs=(number,)))
    return Replicated(model, devices, threads)


def _loop(
    network: UserNetwork,
    model: nn.Module,
    device: torch.device,
    batch: Any,
    clock: Clock,
    backward: Callable[[Tensor], None] = Tensor.backward,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """The raw loop, which all levels but the Trainer's have."""
    optimizer = optimizer or training.make_optimizer(network, training.trained(model))
    while clock.done < clock.all_steps:
        samples = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        backward(training.loss_of(network, model, samples))
        optimizer.step()
        optimizer.zero_grad()
        clock.count()


def _core(network: UserNetwork, model: nn.Module, device: torch.device, batch: Any, clock: Clock) -> None:
    from common.accelerator import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    prepared, optimizer = accelerator.prepare(model, training.make_optimizer(network, training.trained(model)))
    _loop(network, prepared, device, batch, clock, accelerator.backward, optimizer)
    accelerator.end_training()


def _trainer(network: UserNetwork, model: nn.Module, device: torch.device, batch: Any, clock: Clock) -> None:
    from common.trainer import Trainer, TrainerCallback, TrainingArguments

    inputs, targets = batch

    class OwnTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return training.loss_of(network, model, (inputs["inputs"], inputs["targets"]))

    class Counting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock.count()

    def collate(_: Sequence[int]) -> dict[str, Any]:
        return {"inputs": inputs, "targets": targets}

    # The summary that a Trainer prints at its end belongs to no table.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,  # the collator makes the batch out of any sample
            max_steps=clock.all_steps,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            use_cpu=device.type == "cpu",
        )
        # As many samples as the steps need. What they are does not matter: the collator has the batch.
        samples = range(clock.all_steps * int(os.environ["WORLD_SIZE"]))
        optimizers = (training.make_optimizer(network, training.trained(model)), None)
        more = {"callbacks": [Counting()], "optimizers": optimizers}
        trainer = OwnTrainer(model, arguments, collate, samples, **more)
        trainer.train()
    trainer.end()
