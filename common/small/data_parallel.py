"""DataParallel in four steps — replicate, scatter, parallel_apply, gather — on CPU threads instead of GPUs.

`torch.nn.DataParallel` does this at every forward: copy the network to each device, cut the batch into shards, run one
thread per device, and bring the outputs back to the first device, where the loss is computed. Backward runs the four
steps in reverse: the output's gradient is scattered, each replica computes its own, and their sums arrive on the
first device, the only one that holds an optimizer. So the first device does more, and everything waits for it.

The outputs and gradients are those of `nn.DataParallel`. Its memory is not quite: torch copies all parameters in one
autograd function, and so keeps the gradients of all copies until the last one is there.
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from common.nested import leaves, map_nested
from common.small.replica_threads import OwnRandomness, draw_generators, take_cores


def replica_devices(first: torch.device, replicas: int) -> list[torch.device]:
    """The GPU of each replica, beginning with `first`; or `first` alone, where the emulation has to do.

    `nn.DataParallel` takes GPUs only, and on fewer than two it runs the bare module.
    """
    gpus = torch.cuda.device_count() if first.type == "cuda" else 0
    if gpus < 2:
        return [first]
    indices = [(first.index + i) % gpus for i in range(replicas)]
    return [torch.device("cuda", index) for index in indices]


def seed_replicas(seed: int, devices: Sequence[torch.device]) -> None:
    """Seed the CPU with `seed`, and the GPU of replica i with `seed` + i: all alike would drop the same units.

    The emulation needs the CPU's seed only: it draws those of its replicas from there.
    """
    torch.manual_seed(seed)
    for i, device in enumerate(devices):
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed + i)


class EmulatedDataParallel(nn.Module):
    """`module` on `replicas` threads; outputs and gradients are those of the bare module.

    `forward` takes and returns what `module` does. The first dimension of each tensor is the batch, of at least one
    sample. A batch smaller than the number of replicas leaves some of them idle. Each replica draws its random numbers
    from a generator of its own, seeded from torch's at the first forward, so that runs repeat whatever the order in
    which the threads are scheduled.
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        # A thread of its own for every replica. Autograd numbers the operations of each thread, and adds the replicas'
        # gradients in the order of these numbers: if replicas changed threads, runs would not repeat to the last bit.
        self._threads = []
        for device in range(replicas):
            thread = ThreadPoolExecutor(1, "replica", initializer=take_cores, initargs=(device, replicas))
            self._threads.append(thread)
        self._generators: list[torch.Generator] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._generators:
            batch = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._generators = draw_generators(len(self._threads), batch.device)
        shards = scatter((args, kwargs), len(self._threads))
        replicas = replicate(self.module, len(shards))
        outputs = self.parallel_apply(replicas, shards)
        return gather(outputs)

    def parallel_apply(self, replicas: list[nn.Module], shards: list[tuple[tuple, dict]]) -> list[Any]:
        """Run every replica on its shard, all at the same time; an exception in one is raised here."""
        # Settings of each thread.
        gradients = torch.is_grad_enabled()
        kind = self._generators[0].device.type
        dtype = torch.get_autocast_dtype(kind)
        autocast = torch.is_autocast_enabled(kind)

        def apply(replica: nn.Module, shard: tuple[tuple, dict], generator: torch.Generator) -> Any:
            args, kwargs = shard
            with torch.set_grad_enabled(gradients), torch.autocast(kind, dtype, autocast), OwnRandomness(generator):
                return replica(*args, **kwargs)

        jobs = []
        # A small batch leaves the last replicas without a shard.
        for thread, replica, shard, generator in zip(self._threads, replicas, shards, self._generators, strict=False):
            jobs.append(thread.submit(apply, replica, shard, generator))
        return [job.result() for job in jobs]


def replicate(module: nn.Module, n: int) -> list[nn.Module]:
    """`n` networks whose parameters are copies that autograd follows back to the originals.

    The first replica shares the storage of `module`, buffers included, so that what a forward writes into a buffer
    stays; the others get copies on their devices.
    """
    tensors = [*module.parameters(), *module.buffers()]
    replicas = []
    for device in range(n):
        # `deepcopy` has a memo, by id, of what it has copied already. With the tensors' copies in it, `deepcopy` makes
        # new modules and puts these copies into them.
        memo = {id(tensor): copy_to(tensor, 0, device) for tensor in tensors}
        replicas.append(copy.deepcopy(module, memo))
    return replicas


def scatter(inputs: Any, n: int) -> list[Any]:
    """The inputs in at most `n` shards of nearly equal size, shard i on device i; each has all that is no tensor.

    A tensor without a dimension cannot be cut: it is an error, as with torch's.
    """
    batches = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    shards = []
    for device in range(min(len(batch.chunk(n)) for batch in batches)):

        def own_part(leaf: Any, device: int = device) -> Any:
            return copy_to(leaf.chunk(n)[device], 0, device) if isinstance(leaf, Tensor) else leaf

        shards.append(map_nested(own_part, inputs))
    return shards


def gather(outputs: list[Any]) -> Any:
    """The replicas' outputs joined on the first device; a number of each becomes a vector, as with torch's."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        return torch.cat([copy_to(torch.atleast_1d(part), device, 0) for device, part in enumerate(parts)])

    return map_nested(join, *outputs)


def copy_to(tensor: Tensor, source: int, target: int) -> Tensor:
    """The tensor on device `target` that is on device `source` now; gradients flow back.

    The devices of the emulation share their memory, so a copy in it does. Where `source` is `target` nothing is copied.
    """
    return tensor.view_as(tensor) if source == target else tensor.clone()
