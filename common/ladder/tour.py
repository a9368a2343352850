"""The greeting for a new user: a description of this machine, and the commands to type next.

python -m common.ladder
"""

import os
import textwrap
from collections import Counter
from dataclasses import dataclass

import torch

from common.cores import available_cores
from common.data import mnist_on_disk
from common.ladder import DISTRIBUTED, levels


@dataclass(frozen=True)
class Machine:
    """The hardware and the data that the levels will find here."""

    cores: int  # that this process may use
    gpus: tuple[str, ...]  # their names
    data_dir: str
    mnist: bool  # all four files are there

    @property
    def processes(self) -> int:
        """The number of processes that the tour suggests: one for each GPU, and two without GPUs."""
        return len(self.gpus) or 2


def look() -> Machine:
    """A description of this machine. No data is read, and nothing is asked of a network."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    data_dir = os.environ.get("MNIST_ROOT", "data")
    return Machine(available_cores(), tuple(gpus), data_dir, mnist_on_disk(data_dir))


def command(level: str, machine: Machine) -> str:
    """The command that starts the level for 100 steps, with a batch that all processes can share."""
    script = f"{level}/train.py --max-steps 100"
    if level not in DISTRIBUTED:
        return f"python {script}"
    n = machine.processes
    start = f"torchrun --standalone --nproc-per-node {n} {script}"
    if 64 % n == 0:
        return start
    batch_size = max(64 // n, 1) * n
    return f"{start} --batch-size {batch_size}"


def text(machine: Machine) -> str:
    """The whole greeting; its sentences in 80 columns, each command on a line."""
    first, *others = levels()
    counts = Counter(machine.gpus)
    gpus = ", ".join(f"{count} × {name}" for name, count in counts.items())
    data = f"MNIST, in {machine.data_dir}"
    if not machine.mnist:
        data = f"MNIST is not in {machine.data_dir}: it is downloaded, or else replaced by synthetic digits"
    climb = "\n".join(command(level, machine) for level in others)
    welcome = (
        "The parallelism ladder: one MNIST training run, written at five levels. Each level hands more of the "
        "work to a library; the result stays the same."
    )
    return f"""{textwrap.fill(welcome, 80)}

This machine:
  cores   {machine.cores}
  GPUs    {gpus or "none"}
  data    {data}
  torch   {torch.__version__}

Start here, with 100 steps instead of an epoch:
{command(first, machine)}

Then climb:
{climb}

What changes from one level to the next:
python -m common.ladder diff 00 01

All levels side by side, in one table:
python -m benchmarks.compare
"""
