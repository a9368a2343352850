"""Peak memory per device of DataParallel and of DDP on 1, 2, 4 and 8 devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.memory`; DDP's ranks are real processes, each accounted for by itself. Where the machine has
so many GPUs, the same steps run on them too, and CUDA's allocator says what it gave out at most.

    python -m benchmarks.suites.memory
    python -m benchmarks.suites.memory --networks basic_net --devices 2 4
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from benchmarks.harness import records
from benchmarks.harness.networks import NETWORKS, Network
from benchmarks.report.verdicts import spread
from common.data_parallel import EmulatedDataParallel
from common.memory import CATEGORIES, UNNAMED, accounting
from common.processes import process_group, ranks

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets in the second
TIMEOUT = 300  # seconds, for the ranks of one world size
DATA_PARALLEL = "DataParallel"
DDP = "DDP"
WRAPPERS = (DATA_PARALLEL, DDP)


@dataclass(frozen=True)
class Share:
    """What one process stands for under a wrapper: DDP's rank for one device, DataParallel's process for all."""

    wrapper: str
    devices: int

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.wrapper == DDP else 0

    @property
    def own_devices(self) -> range:
        """The indices of this process's devices."""
        if self.wrapper == DDP:
            return range(self.rank, self.rank + 1)
        return range(self.devices)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model) if self.wrapper == DDP else EmulatedDataParallel(model, self.devices)

    def of_batch(self, part: Tensor) -> Tensor:
        """This process's samples of a global batch, in memory of their own."""
        if self.wrapper == DDP:
            shares = part.chunk(self.devices)
            part = shares[self.rank]
        return part.clone()


def train(network: Network, device: torch.device, share: Share, steps: int = STEPS) -> None:
    """A few steps as levels 01 and 02 take them; under DDP this rank's share of them."""
    torch.manual_seed(0)
    model = network.build()
    model = share.wrap(model.to(device))
    # One parameter after the other: the same temporaries on every kind of device.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
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
    """For each network the bytes in each category on each device that this process stands for, at its peak."""
    result = []
    for name in names:
        with accounting() as ledger:
            train(NETWORKS[name], torch.device("cpu"), share)
        peaks = ledger.peaks()
        result.append(list(peaks.values()))
    return result


def peak_tensors(name: str, devices: int, count: int = 12) -> list[str]:
    """The largest tensors on device 0 at DataParallel's peak, as a table: what each is, its shape, its MiB."""
    with accounting() as ledger:
        train(NETWORKS[name], torch.device("cpu"), Share(DATA_PARALLEL, devices))
    found = ledger.at_peak(0)
    total = sum(held.size for held in found)
    lines = [f"Device 0 at its peak of {total / 2**20:.1f} MiB, {NETWORKS[name].title} on {devices} devices:"]
    for held in found[:count]:
        shape = " × ".join(map(str, held.shape))
        lines.append(f"  {held.category:<16}{held.operation:<36}{shape:>18}{held.size / 2**20:>8.2f}")
    return lines


def allocated(names: list[str], share: Share) -> list[list[int]]:
    """For each network the most bytes that CUDA's allocator gave out on each GPU of this process."""
    devices = share.own_devices
    first = torch.device("cuda", devices[0])
    result = []
    for name in names:
        train(NETWORKS[name], first, share, steps=1)  # libraries take what they keep
        for index in devices:
            torch.cuda.synchronize(index)
            torch.cuda.reset_peak_memory_stats(index)
        train(NETWORKS[name], first, share)
        for index in devices:
            torch.cuda.synchronize(index)
        result.append([torch.cuda.max_memory_allocated(index) for index in devices])
    return result


def as_rank(function: Callable, names: list[str], world_size: int, backend: str) -> list:
    """A job for one of `world_size` ranks: `function` within a process group of theirs."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["RANK"]))
    with process_group(backend):
        return function(names, Share(DDP, world_size))


def on_ranks(function: Callable, names: list[str], world_size: int, backend: str) -> list[list]:
    """`function` on `world_size` processes: for each network the ranks' results in one list, in rank order."""
    by_rank = ranks(world_size).run(as_rank, function, names, world_size, backend, timeout=TIMEOUT)
    by_network = []
    for position, _ in enumerate(names):
        devices = []
        for results_of_rank in by_rank:
            devices += results_of_rank[position]
        by_network.append(devices)
    return by_network


def measure(names: list[str], counts: list[int], bar: tqdm | None = None) -> list[dict]:
    """A row for each network, wrapper and number of devices.

    `peaks` has the bytes of each category on each device, simulated; `allocated` what CUDA's allocator gave out on each
    GPU, None where there are not so many, and `source` says which of the two is to be believed.
    """
    rows = []
    for devices in counts:
        for wrapper in WRAPPERS:
            peaks = _simulated(names, wrapper, devices)
            real = _measured(names, wrapper, devices)
            for name, split, measured in zip(names, peaks, real, strict=True):
                row = {
                    "network": name,
                    "title": NETWORKS[name].title,
                    "global_batch_size": NETWORKS[name].batch_size,
                    "wrapper": wrapper,
                    "devices": devices,
                    "peaks": split,
                    "allocated": measured,
                    "source": "measured" if measured else "simulated",
                }
                rows.append(row)
            if bar is not None:
                bar.update()
    return rows


def _simulated(names: list[str], wrapper: str, devices: int) -> list[list[dict[str, int]]]:
    """Of each network the accounted peak of each device."""
    if wrapper == DDP:
        return on_ranks(accounted, names, devices, "gloo")
    return accounted(names, Share(wrapper, devices))


def _measured(names: list[str], wrapper: str, devices: int) -> list[list[int] | None]:
    """Of each network what CUDA's allocator gave out on each device, or None where there are not so many GPUs."""
    if torch.cuda.device_count() < devices:
        return [None] * len(names)
    if wrapper == DDP:
        return on_ranks(allocated, names, devices, "nccl")
    return allocated(names, Share(wrapper, devices))


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
    """The rows' `cells` in 80 columns."""
    form = "{:<14} {:<4} {:>1}" + " {:>5}" * 6 + " {:>5} {:>5} {:>4}"
    lines = [
        form.format("", "", "", "para-", "grad-", "", "acti-", "com-", "temp-", "dev.", "", ""),
        form.format("network", "by", "n", "mtrs", "ients", "optim", "vat.", "mun.", "orar.", "0", "least", "rat."),
    ]
    for row in rows:
        wrapper = "DP" if row["wrapper"] == DATA_PARALLEL else row["wrapper"]
        lines.append(form.format(row["title"], wrapper, row["devices"], *cells(row)))
    return "\n".join(lines)


def cells(row: dict) -> list[str]:
    """What a table says of a row, in MiB: device 0 by category and as a whole, the emptiest device; and the spread."""
    sizes = totals(row)
    first_device = row["peaks"][0]
    by_category = [in_category(first_device, name) for name in CATEGORIES]
    shown = [*by_category, sizes[0], min(sizes)]
    mib = [f"{size / 2**20:.1f}" for size in shown]
    return [*mib, f"{spread(sizes):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.memory", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    names = list(NETWORKS)
    flag("--networks", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    flag("--devices", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="1 2 4 8")
    flag("--json", type=Path, metavar="PATH", help="write the rows there")
    options = parser.parse_args()
    if min(options.devices) < 1:
        parser.error("--devices must be at least 1")
    with tqdm(total=len(options.devices) * len(WRAPPERS), leave=False, disable=None) as bar:
        rows = measure(options.networks, options.devices, bar)
    print(table(rows))
    print("MiB at the peak of three steps of AdamW; the split is simulated, every tensor charged to its device.")
    print("Not counted: workspaces of cuBLAS and cuDNN, NCCL's buffers, the CUDA context, fragmentation.")
    for name in options.networks:
        for line in peak_tensors(name, max(options.devices)):
            print(line)
    if options.json:
        records.write_json(options.json, {"memory": rows})


if __name__ == "__main__":
    main()
