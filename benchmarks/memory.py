"""Peak memory per device of DataParallel and of DDP on 1, 2, 4 and 8 devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.accounting`; DDP's ranks are real processes, each accounted for by itself. Where the machine has
so many GPUs, the same steps run on them too, and CUDA's allocator says what it gave out at most.

    python -m benchmarks.memory
    python -m benchmarks.memory --networks basic_net --devices 2 4
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from benchmarks.networks import NETWORKS, Network
from benchmarks.verdicts import spread
from benchmarks.workers import ranks
from common.accounting import CATEGORIES, accounting
from common.data_parallel import data_parallel

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets in the second
TIMEOUT = 300  # seconds, for the ranks of one world size
WRAPPERS = ("DataParallel", "DDP")


def train(network: Network, device: torch.device, wrapper: str, devices: int, steps: int = STEPS) -> None:
    """A few steps as levels 01 and 02 take them; under DDP this rank's share of them."""
    rank, world_size = (dist.get_rank(), devices) if wrapper == "DDP" else (0, 1)
    torch.manual_seed(0)
    model = network.build().to(device)
    model = DistributedDataParallel(model) if wrapper == "DDP" else data_parallel(model, devices)
    # One parameter after the other: the same temporaries on every kind of device.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        images, targets = (part.chunk(world_size)[rank].clone().to(device) for part in network.batch())
        loss = network.loss(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accounted(names: list[str], wrapper: str, devices: int) -> list[list[dict[str, int]]]:
    """For each network the bytes in each category on each device that this process stands for, at its peak."""
    result = []
    for name in names:
        with accounting() as ledger:
            train(NETWORKS[name], torch.device("cpu"), wrapper, devices)
        result.append(list(ledger.peaks().values()))
    return result


def allocated(names: list[str], wrapper: str, devices: int) -> list[list[int]]:
    """For each network the most bytes that CUDA's allocator gave out on each GPU of this process."""
    result, first = [], dist.get_rank() if wrapper == "DDP" else 0
    own = range(first, first + (1 if wrapper == "DDP" else devices))
    for name in names:
        train(NETWORKS[name], torch.device("cuda", first), wrapper, devices, steps=1)  # libraries take what they keep
        for index in own:
            torch.cuda.synchronize(index)
            torch.cuda.reset_peak_memory_stats(index)
        train(NETWORKS[name], torch.device("cuda", first), wrapper, devices)
        for index in own:
            torch.cuda.synchronize(index)
        result.append([torch.cuda.max_memory_allocated(index) for index in own])
    return result


def as_rank(function, names: list[str], world_size: int, backend: str) -> list:
    """A job for one of `world_size` ranks: `function` within a process group of theirs."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group(backend)
    try:
        return function(names, "DDP", world_size)
    finally:
        dist.destroy_process_group()


def on_ranks(function, names: list[str], world_size: int, backend: str) -> list[list]:
    """`function` on `world_size` processes: for each network the ranks' results in one list, in rank order."""
    by_rank = ranks(world_size).run(as_rank, function, names, world_size, backend, timeout=TIMEOUT)
    return [[device for own in of_network for device in own] for of_network in zip(*by_rank, strict=True)]


def measure(names: list[str], counts: list[int], bar: tqdm | None = None) -> list[dict]:
    """A row for each network, wrapper and number of devices.

    `peaks` has the bytes of each category on each device, simulated; `allocated` what CUDA's allocator gave out on each
    GPU, None where there are not so many, and `source` says which of the two is to be believed.
    """
    rows = []
    for devices in counts:
        for wrapper in WRAPPERS:
            on_gpus = torch.cuda.device_count() >= devices
            if wrapper == "DDP":
                peaks = on_ranks(accounted, names, devices, "gloo")
                real = on_ranks(allocated, names, devices, "nccl") if on_gpus else [None] * len(names)
            else:
                peaks = accounted(names, wrapper, devices)
                real = allocated(names, wrapper, devices) if on_gpus else [None] * len(names)
            for name, split, measured in zip(names, peaks, real, strict=True):
                rows.append(
                    {
                        "network": name,
                        "title": NETWORKS[name].title,
                        "global_batch_size": NETWORKS[name].batch_size,
                        "wrapper": wrapper,
                        "devices": devices,
                        "peaks": split,
                        "allocated": measured,
                        "source": "measured" if measured else "simulated",
                    }
                )
            if bar is not None:
                bar.update()
    return rows


def totals(row: dict) -> list[int]:
    """The peak bytes of each device, measured where they were."""
    return row["allocated"] or [sum(split.values()) for split in row["peaks"]]


def table(rows: list[dict]) -> str:
    """The rows' `cells` in 80 columns."""
    form = "{:<14} {:<12} {:>2}" + " {:>5}" * 5 + " {:>6} {:>5} {:>5}"
    lines = [
        form.format("", "", "", "para-", "grad-", "", "acti-", "", "device", "", ""),
        form.format("network", "wrapper", "n", "mtrs", "ients", "optim", "vat.", "other", "0", "least", "ratio"),
    ]
    for row in rows:
        lines.append(form.format(row["title"], row["wrapper"], row["devices"], *cells(row)))
    return "\n".join(lines)


def cells(row: dict) -> list[str]:
    """What a table says of a row, in MiB: device 0 by category and as a whole, the emptiest device; and the spread."""
    sizes = totals(row)
    mib = [*(row["peaks"][0][name] for name in CATEGORIES), sizes[0], min(sizes)]
    return [*(f"{size / 2**20:.1f}" for size in mib), f"{spread(sizes):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
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
    if options.json:
        options.json.write_text(json.dumps({"memory": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
