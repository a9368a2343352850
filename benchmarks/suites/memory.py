"""Peak memory per device of DataParallel, DDP and FSDP2 on 1, 2, 4 and 8 devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.memory`; DDP's ranks are real processes, each accounted for by itself. Where the machine has
so many GPUs, the same steps run on them too, and CUDA's allocator says what it gave out at most.
"""

import gc
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.networks import NETWORKS, Network
from benchmarks.report.verdicts import spread
from common.memory import CATEGORIES, UNNAMED, accounting, follow_size, name_category
from common.process_group import process_group
from common.processes import ranks
from common.small.data_parallel import EmulatedDataParallel

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets in the second
TIMEOUT = 300  # seconds, for the ranks of one world size
DATA_PARALLEL = "DataParallel"
DDP = "DDP"
BUCKET_VIEWS = "DDP, bucket views"  # gradient_as_bucket_view: the gradients lie in DDP's buckets, not beside them
FOREACH = "DDP, foreach AdamW"  # how AdamW computes on a GPU unless it is told otherwise: all parameters at once
FSDP = "FSDP2"
WRAPPERS = (DATA_PARALLEL, DDP)
ALL_WRAPPERS = (*WRAPPERS, FOREACH, BUCKET_VIEWS, FSDP)
SHORT_CATEGORIES = ("weights", "grads", "state", "act.", "comm.", "temp.")  # heads of narrow columns


@dataclass(frozen=True)
class Share:
    """The devices that one process stands for under a wrapper: a rank for one, DataParallel's process for all."""

    wrapper: str
    devices: int

    @property
    def is_rank(self) -> bool:
        """Has every device a process of its own?"""
        return self.wrapper != DATA_PARALLEL

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.is_rank else 0

    @property
    def own_devices(self) -> range:
        """The indices of this process's devices."""
        if self.is_rank:
            return range(self.rank, self.rank + 1)
        return range(self.devices)

    def wrap(self, network: Network, device: torch.device) -> nn.Module:
        """The network on `device` in the wrapper; DataParallel's replicas on as many GPUs where it is one."""
        model = network.build().to(device)
        if self.wrapper == DATA_PARALLEL:
            # One replica shares the model's device, so level 01 emulates it on a GPU too.
            if device.type == "cuda" and self.devices > 1:
                return nn.DataParallel(model, device_ids=list(self.own_devices))
            return EmulatedDataParallel(model, self.devices)
        if self.wrapper == FSDP:
            return fully_sharded(model, called_modules(network))
        return DistributedDataParallel(model, gradient_as_bucket_view=self.wrapper == BUCKET_VIEWS)

    def of_batch(self, part: Tensor) -> Tensor:
        """This process's samples of a global batch, in memory of their own."""
        if self.is_rank:
            shares = part.chunk(self.devices)
            part = shares[self.rank]
        return part.clone()


def fully_sharded(model: nn.Module, called: Container[str]) -> nn.Module:
    """`model`, of which each rank keeps its part of every parameter; a layer is gathered when it computes.

    Args:
        called: the names of the modules whose forward is called, see `called_modules`. FSDP gathers a module's
            parameters when it is called. So those of a module that its parent uses without calling it, as attention
            does, are gathered with the parent's.
    """
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    owners: dict[nn.Module, list[nn.Module]] = {model: []}  # by what is gathered: the modules whose parameters they are
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            while name not in called:
                name = name.rpartition(".")[0]
            owners.setdefault(model.get_submodule(name), []).append(module)
    # From the innermost on: what is wrapped already is left out of what is wrapped around it.
    for module in reversed(list(model.modules())):
        if module in owners:
            fully_shard(module, mesh=mesh)
            # It runs after FSDP's own hook, which gathers.
            module.register_forward_pre_hook(_NamesGathered(owners[module]))
    return model


def called_modules(network: Network) -> set[str]:
    """The names of the modules whose forward is called when `network` computes, the network's own "" among them."""
    called = set()
    with torch.device("meta"):  # nothing is computed, and nothing allocated
        model = network.build()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        model(torch.empty(2, *network.image))
    return called


class _NamesGathered:
    """A hook that says, for the accounting, which tensors are gathered parameters, and their gradients.

    Args:
        owners: the modules whose parameters are gathered before this hook is called.
    """

    def __init__(self, owners: list[nn.Module]) -> None:
        self.owners = owners
        self.knows_gradients = False

    def __call__(self, *_) -> None:
        for owner in self.owners:
            for parameter in owner.parameters(recurse=False):
                name_category(parameter, "parameters")
                follow_size(parameter)
                if not self.knows_gradients:
                    parameter.register_post_accumulate_grad_hook(_name_gradient)
        self.knows_gradients = True


def _name_gradient(parameter: Tensor) -> None:
    name_category(parameter.grad, "gradients")


def train(network: Network, device: torch.device, share: Share, steps: int = STEPS) -> None:
    """A few steps as levels 01 and 02 take them; under DDP this rank's share of them."""
    torch.manual_seed(0)
    model = share.wrap(network, device)
    for parameter in model.parameters():
        name_category(parameter, "parameters")
    # One parameter after the other, unless asked: the same temporaries on every kind of device.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=share.wrapper == FOREACH)
    for _ in range(steps):
        all_images, all_targets = network.batch()
        images = share.of_batch(all_images).to(device)
        targets = share.of_batch(all_targets).to(device)
        del all_images, all_targets
        loss = network.loss(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accounted(names: list[str], share: Share) -> list[list[dict[str, int]]]:
    """Of each network, for each of this process's devices, the bytes in each category at its peak."""
    result = []
    for name in names:
        with accounting() as ledger:
            train(NETWORKS[name], torch.device("cpu"), share)
        result.append(list(ledger.peaks().values()))
    return result


class Allocated(NamedTuple):
    """A GPU's memory at its peak, in bytes.

    Attributes:
        allocated: what CUDA's allocator gave out at most, without `workspaces`.
        reserved: what it held for it, fragments included.
        workspaces: what cuBLAS keeps for its own use, once for each stream: 8 MiB, or 32 on a Hopper.
    """

    allocated: int
    reserved: int
    workspaces: int


def allocated(names: list[str], share: Share) -> list[list[Allocated]]:
    """For each network what CUDA's allocator gave out on each GPU of this process."""
    devices = share.own_devices
    first = torch.device("cuda", devices[0])
    result = []
    for name in names:
        train(NETWORKS[name], first, share, steps=1)  # libraries take what they keep
        for index in devices:
            torch.cuda.synchronize(index)
        # A wrapper's cycles keep the network before alive, and the allocator keeps its blocks.
        gc.collect()
        held = [torch.cuda.memory_allocated(index) for index in devices]
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = {}
        for index, before in zip(devices, held, strict=True):
            workspaces[index] = before - torch.cuda.memory_allocated(index)
        torch.cuda.empty_cache()
        for index in devices:
            torch.cuda.reset_peak_memory_stats(index)
        train(NETWORKS[name], first, share)
        peaks = []
        for index in devices:
            torch.cuda.synchronize(index)
            own = torch.cuda.max_memory_allocated(index) - workspaces[index]
            peaks.append(Allocated(own, torch.cuda.max_memory_reserved(index), workspaces[index]))
        result.append(peaks)
    return result


def as_rank(function: Callable, names: list[str], wrapper: str, world_size: int, backend: str) -> list:
    """A job for one of `world_size` ranks: `function` within a process group of theirs."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["RANK"]))
    with process_group(backend):
        return function(names, Share(wrapper, world_size))


def on_ranks(function: Callable, names: list[str], wrapper: str, world_size: int, backend: str) -> list[list]:
    """`function` on `world_size` processes: for each network the ranks' results, in rank order."""
    pool = ranks(world_size, on_cpu=backend == "gloo")
    by_rank = pool.run(as_rank, function, names, wrapper, world_size, backend, timeout=TIMEOUT)
    return [list(results) for results in zip(*by_rank, strict=True)]


def measure(names: list[str], counts: list[int], wrappers: tuple[str, ...] = WRAPPERS) -> list[dict]:
    """A row for each network, wrapper and number of devices.

    `peaks` has the bytes of each category on each device, simulated. Of each GPU `allocated` is what CUDA's allocator
    gave out, `reserved` what it held, and `workspaces` what cuBLAS had beside; all are None where there are not so many
    GPUs. `source` says which is to be believed.
    """
    rows = []
    for devices in counts:
        for wrapper in wrappers:
            simulated = _simulated(names, wrapper, devices)
            real = _measured(names, wrapper, devices)
            for name, peaks, measured in zip(names, simulated, real, strict=True):
                network = NETWORKS[name]
                row = {
                    "network": name,
                    "title": network.title,
                    "global_batch_size": network.batch_size,
                    "wrapper": wrapper,
                    "devices": devices,
                    "peaks": peaks,
                    "allocated": None,
                    "reserved": None,
                    "workspaces": None,
                    "source": "simulated",
                }
                if measured:
                    row["allocated"] = [peak.allocated for peak in measured]
                    row["reserved"] = [peak.reserved for peak in measured]
                    row["workspaces"] = [peak.workspaces for peak in measured]
                    row["source"] = "measured"
                rows.append(row)
    return rows


def _simulated(names: list[str], wrapper: str, devices: int) -> list[list[dict[str, int]]]:
    """Of each network the accounted peak of each device."""
    if wrapper == DATA_PARALLEL:
        return ranks(1, on_cpu=True).run(accounted, names, Share(wrapper, devices), timeout=TIMEOUT)[0]
    result = []
    for of_ranks in on_ranks(accounted, names, wrapper, devices, "gloo"):
        result.append([peaks for (peaks,) in of_ranks])
    return result


def _measured(names: list[str], wrapper: str, devices: int) -> list[list[Allocated] | None]:
    """Of each network what CUDA's allocator gave out on each device, or None where there are not so many GPUs."""
    if torch.cuda.device_count() < devices:
        return [None] * len(names)
    if wrapper == DATA_PARALLEL:
        return allocated(names, Share(wrapper, devices))
    result = []
    for of_ranks in on_ranks(allocated, names, wrapper, devices, "nccl"):
        result.append([peak for (peak,) in of_ranks])
    return result


def accounted_totals(row: dict) -> list[int]:
    """The accounted peak bytes of each device, whatever else was measured."""
    return [sum(split.values()) for split in row["peaks"]]


def totals(row: dict) -> list[int]:
    """The peak bytes of each device, measured where they were."""
    return row["allocated"] or accounted_totals(row)


def in_category(split: dict[str, int], name: str) -> int:
    """The bytes of one category of a device's peak.

    Records of before have "other", in which communication and temporaries are one; it is shown as temporaries.
    """
    if name == UNNAMED:
        return split.get(name, 0) + split.get("other", 0)
    return split.get(name, 0)


def table(rows: list[dict]) -> str:
    """The rows' `cells` in 80 columns, and what they mean."""
    form = "  {:<23}{:>8}" + "{:>6}" * 5 + "{:>6}{:>6}{:>5}"
    lines = ["MiB at the peak of a step; of device 0 what it holds, and the sum"]
    lines.append(form.format("", *SHORT_CATEGORIES, "sum", "least", "×"))
    for title in dict.fromkeys(row["title"] for row in rows):
        lines.append(title)
        for row in rows:
            if row["title"] == title:
                lines.append(form.format(f"{row['wrapper']} on {row['devices']}", *cells(row)))
    lines += [
        "least: the sum of the device that holds least; ×: the fullest device's sum, as",
        "a multiple of it. grads: gradients; state: AdamW's; act.: activations; comm.:",
        "communication, that is buckets and gathered outputs; temp.: temporaries.",
        "foreach AdamW updates all parameters at once, as on a GPU; with bucket views",
        "the gradients lie in DDP's buckets. Three steps of AdamW; the split is",
        "simulated, every tensor charged to its device. Not counted: workspaces of",
        "cuBLAS and cuDNN, NCCL's buffers, the CUDA context, fragmentation.",
    ]
    return "\n".join(lines)


def cells(row: dict) -> list[str]:
    """A row of the table, in MiB: device 0 by category and as a whole, the emptiest device; and the ratio."""
    sizes = totals(row)
    first_device = row["peaks"][0]
    by_category = [in_category(first_device, name) for name in CATEGORIES]
    shown = [*by_category, sizes[0], min(sizes)]
    mib = [f"{size / 2**20:.1f}" for size in shown]
    return [*mib, f"{spread(sizes):.2f}"]


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_memory")
