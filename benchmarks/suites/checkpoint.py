"""A checkpoint's cost: saving and loading the state of a training, by the core, by accelerate and by torch alone.

The core promises more than the others: a checkpoint is whole or not there after a crash of the machine too, and damage
is found before anything is loaded. What that takes is in its times. All of them save the same model and AdamW's state
to a new folder; torch writes both to one file. On several processes the first one writes, and all of them read.

A cold load finds none of the files in memory: before it, each file is flushed to the disk and taken out of the system's
cache by posix_fadvise. What a disk, or the host of a virtual machine, keeps in memory of its own is still there.
"""

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Extent, Group
from benchmarks.harness.paired import Samples, order
from benchmarks.harness.process_facts import process_facts
from benchmarks.suites.overhead import missing
from common.cores import available_cores
from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks

TIMEOUT = 900  # seconds, for saving once and loading twice
WORLDS = (1, 2)
OURS = "common.accelerator"
THEIRS = "accelerate"
TORCH = "torch.save"
LIBRARIES = (OURS, THEIRS, TORCH)
ACTIONS = ("save", "load", "cold load")
WIDTH = 2048
LAYERS = 12
QUICK = "basic"  # the network that --quick saves


class Network(NamedTuple):
    """A network whose training is saved; its name says how many bytes the checkpoint has."""

    name: str
    make: Callable[[], torch.nn.Module]


def wide_layers() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


NETWORKS = {
    "wide": Network(f"{LAYERS} layers of {WIDTH} x {WIDTH}, 604 MB", wide_layers),
    "basic": Network("BasicNet, 14 MB", BasicNet),
}


class Training(NamedTuple):
    """Saving and loading of one process's training by one library."""

    save: Callable[[], None]
    load: Callable[[], None]
    end: Callable[[], None]


def milliseconds(library: str, network: str, folder: str) -> dict[str, float]:
    """On one of the ranks: the time of each action, and how the rank is set, see `process_facts`."""
    torch.set_num_threads(max(1, available_cores() // int(os.environ["WORLD_SIZE"])))
    torch.manual_seed(0)
    model = NETWORKS[network].make()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    place = Path(folder)
    begin = begin_with_torch if library == TORCH else partial(begin_with_accelerator, library)
    training = begin(model, optimizer, place)
    try:
        found = {"save": _time(training.save), "load": _time(training.load)}
        _drop_from_cache(place)
        found["cold load"] = _time(training.load)
    finally:
        training.end()
    return found | process_facts()


def begin_with_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Training:
    group = process_group()
    group.__enter__()
    path = folder / "checkpoint.pt"

    def save() -> None:
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()

    def load() -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        dist.barrier()

    return Training(save, load, end=lambda: group.__exit__(None, None, None))


def begin_with_accelerator(
    library: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> Training:
    module = importlib.import_module(library)
    accelerator = module.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    path = str(folder / "checkpoint")

    def save() -> None:
        accelerator.save_state(path)
        accelerator.wait_for_everyone()

    def load() -> None:
        accelerator.load_state(path)
        accelerator.wait_for_everyone()

    def end() -> None:
        accelerator.end_training()
        if library == THEIRS:  # its states outlive it, and this process will have other jobs
            module.state.AcceleratorState._reset_state(reset_partial_state=True)
            module.state.GradientState._reset_state()
        if dist.is_initialized():
            dist.destroy_process_group()

    return Training(save, load, end)


def _time(action: Callable[[], None]) -> float:
    """Milliseconds until all processes have done it, while nothing else is being written to the disk."""
    os.sync()
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def _drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row_of(library: str, action: str) -> str:
    return f"{action}, {library}"


def groups() -> list[Group]:
    libraries = [library for library in LIBRARIES if library != THEIRS or not missing(THEIRS)]
    rows = tuple(row_of(library, action) for action in ACTIONS for library in libraries)
    found = []
    for world in WORLDS:
        for key, network in NETWORKS.items():
            title = f"a checkpoint of {network.name}, {world} process{'es' if world > 1 else ''}"
            found.append(Group(f"checkpoint-{key}-{world}", title, rows, partial(measured, title, key, world)))
    return found


def measured(title: str, network: str, world: int, rows: tuple[str, ...], extent: Extent) -> dict:
    """The record of these rows. A library that one of them names does all three actions in every round."""
    if not hasattr(os, "posix_fadvise"):
        raise CannotMeasure("a file cannot be taken out of this system's cache")
    if extent.quick and network != QUICK:
        raise CannotMeasure(f"--quick saves {NETWORKS[QUICK].name}, only")
    libraries = [library for library in LIBRARIES if any(row.endswith(f", {library}") for row in rows)]
    samples: Samples = {row: [] for row in rows}
    facts: dict[str, dict] = {}
    for turn in range(extent.rounds):
        for library in order(libraries, turn):
            found = slowest_rank(library, network, world)
            for action in ACTIONS:
                row = row_of(library, action)
                if row in samples:
                    samples[row].append(found[action])
                    facts[row] = {key: value for key, value in found.items() if key not in ACTIONS}
    ratios = []
    for action in ACTIONS:
        ratios.append((row_of(OURS, action), row_of(THEIRS, action)))
        ratios.append((row_of(OURS, action), row_of(TORCH, action)))
    return records.group(title, "ms", samples, facts, ratios)


def slowest_rank(library: str, network: str, world: int) -> dict:
    """One saving and two loadings, in a folder that is removed afterwards; the slowest rank counts."""
    folder = tempfile.mkdtemp(prefix="checkpoint-")
    try:
        results = ranks(world).run(milliseconds, library, network, folder, timeout=TIMEOUT)
    finally:
        shutil.rmtree(folder)
    slowest = {action: max(result[action] for result in results) for action in ACTIONS}
    return results[0] | slowest


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_checkpoint")
