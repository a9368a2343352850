"""A greeting for a new user: this machine, what each level will use of it, what to expect, what to type next.

python -m common.ladder
"""

import os
import textwrap
from collections import Counter
from dataclasses import dataclass

import torch

from common.cores import available_cores
from common.data import mnist_on_disk
from common.ladder.scripts import DISTRIBUTED, levels

WIDTH = 80


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


def expectation(machine: Machine) -> str:
    """The speed to expect of several processes here, before anybody is disappointed."""
    n, gpus, cores = machine.processes, len(machine.gpus), machine.cores
    if gpus > 1:
        return (
            f"{n} GPUs are not {n} times as fast here. The network is small: at batch 64 a GPU gets "
            f"{64 // n} images, and launching the kernels and averaging the gradients take longer than computing. "
            f"Larger batches gain more: try --batch-size {2048 // n * n}."
        )
    if gpus:
        return (
            "There is one GPU, so every level is one process, and about as fast as level 00. They show what changes "
            "and what does not; speed needs a second GPU."
        )
    if cores == 1:
        return (
            f"{n} processes take turns on one core and average their gradients besides: they are slower than one "
            "process. They show that the result is the same, and where the memory goes."
        )
    share = f"Each of {n} processes gets {cores // n} of the {cores} cores that one process has alone, and "
    if cores <= 4:
        return share + (
            "all of them pay for averaging the gradients: at batch 64 they are no faster than one process. "
            "They are faster than one process that has no more cores than each of them; the comparison below "
            "shows both. The result is always the same."
        )
    return share + (
        "all of them pay for averaging the gradients. A small batch does not keep many threads busy, so they may "
        "gain something; do not expect twice the speed."
    )


def text(machine: Machine) -> str:
    """The whole greeting, in 80 columns."""
    first, *others = levels()
    paragraphs = [
        _wrap(
            "The parallelism ladder: one MNIST training run, written at five levels. Each level hands more of the "
            "work to a library; the result stays the same."
        ),
        ["This machine (each level's first line says what it uses of it)", *_facts(machine)],
        ["What to expect", *_wrap(expectation(machine), "  ")],
        ["Start here, with 100 steps instead of an epoch:", *_fold(command(first, machine))],
        ["Then climb:", *_commands(others, machine)],
        ["What changes from one level to the next:", "python -m common.ladder diff 00 01"],
        ["All levels side by side, in one table:", "python -m benchmarks.compare"],
    ]
    blocks = ["\n".join(lines) for lines in paragraphs]
    return "\n\n".join(blocks) + "\n"


def _facts(machine: Machine) -> list[str]:
    """Facts of the machine, a line or more for each kind."""
    counts = Counter(machine.gpus)
    gpus = ", ".join(f"{count} × {name}" for name, count in counts.items())
    facts = {
        "CPU": f"{machine.cores} core{'s' if machine.cores > 1 else ''}",
        "GPU": gpus or "none",
        "data": _data(machine),
        "torch": torch.__version__,
    }
    lines = []
    for name, fact in facts.items():
        lines += _wrap(fact, f"  {name:<10}")
    return lines


def _data(machine: Machine) -> str:
    if machine.mnist:
        return f"MNIST, in {machine.data_dir}"
    return (
        f"MNIST is not in {machine.data_dir}: the first run downloads it. Without a network the levels train on "
        "synthetic digits, and say so"
    )


def _commands(levels: list[str], machine: Machine) -> list[str]:
    lines = []
    for level in levels:
        lines += _fold(command(level, machine))
    return lines


def _wrap(paragraph: str, prefix: str = "") -> list[str]:
    return textwrap.wrap(paragraph, WIDTH, initial_indent=prefix, subsequent_indent=" " * len(prefix))


def _fold(command: str) -> list[str]:
    """A command that a shell takes as it stands, on as many lines as it needs."""
    if len(command) <= WIDTH:
        return [command]
    lines = textwrap.wrap(command, WIDTH - 2, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    continued = [f"{line} \\" for line in lines[:-1]]
    return [*continued, lines[-1]]
