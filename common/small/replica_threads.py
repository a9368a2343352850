"""Random numbers and cores of its own for each replica's thread of the emulated DataParallel."""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.cores import confine_thread_to_device, threads_per_worker


class OwnRandomness(TorchDispatchMode):
    """Lets every random operation draw from this replica's generator: torch's default is shared by all threads.

    Not every operation can be given a generator, so the default one takes over this replica's state for its duration.
    """

    _lock = threading.Lock()

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        device = self.generator.device
        default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        with self._lock:
            others = default.get_state()
            default.set_state(self.generator.get_state())
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(others)


def draw_generators(count: int, device: torch.device) -> list[torch.Generator]:
    """Generators with different seeds, all of which follow from torch's default generator."""
    seed = int(torch.randint(2**62, ()))
    generators = [torch.Generator(device) for _ in range(count)]
    for i, generator in enumerate(generators):
        generator.manual_seed(seed + i)
    return generators


def take_cores(device: int, replicas: int) -> None:
    """The first thing that a replica's thread does: the threads that it starts for torch stay where it is."""
    confine_thread_to_device(device)
    torch.set_num_threads(threads_per_worker(replicas))
