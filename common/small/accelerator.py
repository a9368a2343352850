"""An Accelerator on four pages: all that `03_accelerate/train.py` and the small Trainer call, and nothing else.

Every process runs the whole script. Three places here make one training of them:

- `DataLoaderShard` reads a rank's part of every batch, and counts the samples, so that duplicates are known.
- DistributedDataParallel (DDP), into which `prepare` puts the model, averages the gradients: see `common/small/ddp`.
- `gather_for_metrics` brings together what the ranks have computed, without the duplicates.

The names are those of Hugging Face Accelerate. `common.accelerator` is the whole one. Both import lines of train.py can
name this module instead: the weights are then the same to the last bit.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from common.cores import threads_per_worker
from common.nested import map_nested
from common.process_group import leave_process_group


@dataclass
class DataLoaderConfiguration:
    """The way in which ranks share data. Only the whole Accelerator can do without the first two."""

    split_batches: bool  # a loader's batch is that of all ranks, and each gets a part of it
    use_seedable_sampler: bool  # shuffled data has an order that follows from data_seed + epoch
    data_seed: int
    non_blocking: bool = False  # the CPU goes on while a batch is copied from pinned memory


@dataclass
class InitProcessGroupKwargs:
    timeout: timedelta  # how long a rank waits for the others


class DataLoaderShard:
    """The parts of the batches of `loader` that belong to one rank, on its device.

    Every rank works out the same order of all samples, and reads its own ones; no rank sends samples to another. This
    is who reads which of ten samples, not shuffled, in batches of four, on two ranks:

        batch       rank 0    rank 1    samples_in_step
        0 1 2 3     0 1       2 3       4
        4 5 6 7     4 5       6 7       4
        8 9         8 9       0 1       2

    Ranks wait for each other in every step, so all of them need equally many samples. A last batch that is too short
    is filled up with the first samples of the epoch, here 0 and 1.
    """

    def __init__(self, loader: Any, accelerator: "Accelerator") -> None:
        sampler = loader.sampler
        is_random = isinstance(sampler, RandomSampler) and not sampler.replacement
        visits_all = isinstance(sampler, SequentialSampler) or (is_random and len(sampler) == len(loader.dataset))
        if loader.batch_size is None or not visits_all:
            raise NotImplementedError("only the whole Accelerator takes samplers: give shuffle and batch_size")
        self.loader = loader
        self.accelerator = accelerator
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        """The numbers of all samples in the order of this epoch, which is the same on all ranks."""
        num_samples = len(self.loader.dataset)
        if not isinstance(self.loader.sampler, RandomSampler):  # shuffle=False
            return list(range(num_samples))
        generator = torch.Generator().manual_seed(self.accelerator.dataloader_config.data_seed + self.epoch)
        return torch.randperm(num_samples, generator=generator).tolist()

    def own_batches(self) -> Iterator[list[int]]:
        """The numbers of this rank's samples in each step."""
        batch_size = self.loader.batch_size
        num_processes = self.accelerator.num_processes
        if batch_size % num_processes:
            raise ValueError(f"{num_processes} processes cannot share a batch of {batch_size} equally")
        own_size = batch_size // num_processes
        own_start = own_size * self.accelerator.process_index
        order = self.order()
        for batch in BatchSampler(order, batch_size, self.loader.drop_last):
            while len(batch) < batch_size and num_processes > 1:  # a rank that is alone may take a short batch
                batch = batch + order  # perhaps more than is missing: the line below takes what is needed
            yield batch[own_start : own_start + own_size]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        own_loader: DataLoader = DataLoader(
            self.loader.dataset,
            batch_sampler=list(self.own_batches()),
            collate_fn=self.loader.collate_fn,
            num_workers=self.loader.num_workers,
            pin_memory=self.loader.pin_memory,
        )
        non_blocking = self.accelerator.dataloader_config.non_blocking
        outer_step = self.accelerator.samples_in_step  # of a loop around this one, as an evaluation in an epoch has
        samples_left = len(self.loader.dataset)
        try:
            for batch in own_loader:
                # In the last step this may be less than a batch. gather_for_metrics keeps as many rows, no duplicates.
                self.accelerator.samples_in_step = min(samples_left, self.loader.batch_size)
                samples_left -= self.loader.batch_size
                yield map_nested(lambda tensor: tensor.to(self.accelerator.device, non_blocking=non_blocking), batch)
        finally:  # also where the script leaves the loop by a break
            self.accelerator.samples_in_step = outer_step


class Accelerator:
    """A process of a training: who it is among the others, and what connects them.

    All processes make one, which joins the process group. torchrun tells them who they are; without it there is one.
    """

    def __init__(self, cpu: bool, dataloader_config: DataLoaderConfiguration, kwargs_handlers: list) -> None:
        if not (dataloader_config.split_batches and dataloader_config.use_seedable_sampler):
            raise NotImplementedError("only the whole Accelerator does without split_batches or use_seedable_sampler")
        self.dataloader_config = dataloader_config
        self.process_index = int(os.environ.get("RANK", 0))
        self.num_processes = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main_process = self.process_index == 0  # of all machines
        # Of all ranks, each sample counted once; None outside of a loop. DataLoaderShard says it before each step.
        self.samples_in_step: int | None = None
        self.local_process_index = int(os.environ.get("LOCAL_RANK", 0))  # among the processes of this machine
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        backend = "gloo"
        if torch.cuda.is_available() and not cpu:
            # Not process_index: on the second machine rank 2 is the first process and takes the first GPU.
            self.device = torch.device("cuda", self.local_process_index % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            if local_world_size <= torch.cuda.device_count():
                backend = "nccl"  # faster, but wants a GPU for each process
        store = None  # the processes then find each other by the store that torchrun has made
        if "RANK" in os.environ:
            # torchrun sets OMP_NUM_THREADS to 1 for each process. On a CPU they can have an equal part of the cores.
            torch.set_num_threads(threads_per_worker(local_world_size))
        else:
            store = dist.HashStore()  # a process alone, which nobody has to find
        [group] = kwargs_handlers
        dist.init_process_group(
            backend, store=store, rank=self.process_index, world_size=self.num_processes, timeout=group.timeout
        )

    def prepare(self, *objects: Any) -> list[Any]:
        """The objects of a training, in the same order, for this rank."""
        prepared = []
        for obj in objects:
            if isinstance(obj, nn.Module):
                # DDP gives all ranks the weights of rank 0. From now on it averages the gradients in every backward.
                obj = DistributedDataParallel(obj.to(self.device))
            elif isinstance(obj, DataLoader):
                obj = DataLoaderShard(obj, self)
            # An optimizer stays as it is: equal weights and equal averaged gradients make equal steps on all ranks.
            prepared.append(obj)
        return prepared

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients. While backward runs, DDP replaces each one by its mean over the ranks.

        A rank's loss is the mean over its part of the batch. The parts are equally large, so the mean of the gradients
        is the gradient of the mean loss of the whole batch, as one process alone would compute it.
        """
        loss.backward()

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """The "sum" or the "mean" of the tensors of all ranks. All ranks must call it."""
        result = tensor.clone()
        dist.all_reduce(result)
        return result / self.num_processes if reduction == "mean" else result

    def gather_for_metrics(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Each tensor with the rows of all ranks: one row for each sample of the step. All ranks must call it."""
        gathered = []
        for tensor in tensors:
            of_ranks = [torch.empty_like(tensor) for _ in range(self.num_processes)]
            dist.all_gather(of_ranks, tensor)
            # Joined in the order of the ranks, the parts are the batch again. Duplicates come last: they are cut off.
            gathered.append(torch.cat(of_ranks)[: self.samples_in_step])
        return gathered

    def end_training(self) -> None:
        leave_process_group()  # a model in DDP may outlive its process group


def set_seed(seed: int, device_specific: bool) -> None:
    """Seed torch's random numbers, from which dropout draws; with `device_specific` each rank draws its own."""
    torch.manual_seed(seed + dist.get_rank() if device_specific else seed)
