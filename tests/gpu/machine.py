"""An imitated machine with GPUs: its answers to what a process asks of them and of its process group, and its waits."""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

GPUS = 8
WORLD_SIZE = 8
# The variables that torchrun sets for the second rank on the second of two machines with 8 GPUs each. The run uses 4 on
# each, so that rank (5), local rank (1), ranks of a machine (4) and GPUs of a machine (8) are different numbers.
TORCHRUN_VARIABLES = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": str(WORLD_SIZE),
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
OWN_GPU = torch.device("cuda", 1)
# Waits of the CPU for a GPU.
READ = "a value is read from a GPU"  # `item`, `tolist`, `float` and `if` of a tensor do it.
LENGTH = "the length of a result is read from a GPU"  # `nonzero`, `unique` and a mask as an index do it.
ARRIVED = "a copy to the CPU has arrived"
_init_process_group = dist.init_process_group  # The real one. `Machine` stands in its place, and calls it.


class Misplaced(AssertionError):
    """A tensor or a call that belongs to this process's GPU, on another device."""


@dataclass
class Machine:
    """The GPUs of a process and its process group.

    Attributes:
        own_gpus: the indices of the GPUs that this process is to use.
        current_gpu: the one that "cuda" without an index means.
        backend: the one for which `init_process_group` was asked.
        peaks: the peak in bytes of each GPU whose statistics have been reset, a different one for each.
        waits: the names of the waits of the CPU: `waits[n]` has those between optimizer steps n and n + 1.
        collectives: the names of those so far.
    """

    own_gpus: list[int]
    current_gpu: int = 0
    backend: str | None = None
    peaks: dict[int, int] = field(default_factory=dict)
    waits: list[list[str]] = field(default_factory=lambda: [[]])
    collectives: list[str] = field(default_factory=list)

    def find_own_gpu(self, device: Any, caller: str) -> torch.device:
        """The GPU that `caller` names; None is the current one. Raises Misplaced if this process has no such GPU."""
        gpu = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        if gpu.type != "cuda":
            raise Misplaced(f"{caller} names {gpu}, which is no GPU")
        index = self.current_gpu if gpu.index is None else gpu.index
        if index not in self.own_gpus:
            raise Misplaced(f"{caller} names cuda:{index}, and this process has cuda:{self.own_gpus[0]}")
        return torch.device("cuda", index)

    def note_wait(self, name: str) -> None:
        self.waits[-1].append(name)

    def count_step(self, *_: Any) -> None:
        self.waits.append([])

    def set_device(self, device: Any) -> None:
        self.current_gpu = self.find_own_gpu(device, "set_device").index

    def synchronize(self, device: Any = None) -> None:
        self.find_own_gpu(device, "synchronize")
        self.note_wait("synchronize")

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """The same for every GPU: DataParallel warns where they are unequal, and autocast asks for bfloat16."""
        self.find_own_gpu(device, "get_device_properties")
        return SimpleNamespace(major=9, minor=0, total_memory=2**36, multi_processor_count=100)

    def current_stream(self, device: Any = None) -> SimpleNamespace:
        """A stream whose events can be waited for, and of which no CUDA graph is being made."""
        self.find_own_gpu(device, "current_stream")
        event = SimpleNamespace(synchronize=lambda: self.note_wait(ARRIVED))
        return SimpleNamespace(record_event=lambda: event, is_capturing=lambda: False)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        index = self.find_own_gpu(device, "reset_peak_memory_stats").index
        self.peaks[index] = 2**20 * (index + 1)

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peaks[self.find_own_gpu(device, "max_memory_allocated").index]

    def init_process_group(self, backend: str, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl" and self.current_gpu not in self.own_gpus:
            raise Misplaced("a group of nccl before set_device: every rank would use cuda:0")
        self.backend = backend
        _init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=WORLD_SIZE)

    def barrier(self, *args: Any, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        if self.backend == "nccl" and device_ids != self.own_gpus:
            raise Misplaced(f"barrier with device_ids {device_ids}: nccl would guess a GPU")
        self.note_wait("barrier")
