"""Observers of single calls: collectives on all ranks, `torch.save`, and processes that a script starts itself."""

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from common.doctor.watch_models import ModelWatch
from common.doctor.watcher import Watcher
from common.process_group import COLLECTIVES

ON_ALL_RANKS = (*COLLECTIVES, "barrier", "monitored_barrier")
DEPTH = 3  # at which a state dict lies in what is saved


def install(watcher: Watcher, models: ModelWatch) -> None:
    for name in ON_ALL_RANKS:
        _watch_collective(watcher, name, models)
    _watch_saves(watcher)
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, _refuse)


def _watch_collective(watcher: Watcher, name: str, models: ModelWatch) -> None:
    parameters = inspect.signature(getattr(dist, name))
    calls = watcher.record.collectives

    def note_collective(*args: Any, **kwargs: Any) -> None:
        arguments = parameters.bind(*args, **kwargs).arguments
        if arguments.get("group") not in (None, dist.group.WORLD):
            return
        if name == "all_reduce":
            models.note_all_reduce(arguments["tensor"])
        if dist.is_initialized():
            place = watcher.place(sys._getframe())
            calls.append((name, place[0] if place else "?"))
            watcher.keep()

    watcher.before(dist, name, note_collective)


def _watch_saves(watcher: Watcher) -> None:
    def note_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(f, "name", f)  # of an open file, or itself
        if isinstance(path, str | os.PathLike):
            keys = [key for state in _state_dicts(obj, DEPTH) for key in state]
            watcher.record.saves.append((str(Path(path).resolve()), keys))

    watcher.before(torch, "save", note_save)


def _state_dicts(value: Any, depth: int) -> Iterator[dict[str, Tensor]]:
    if not isinstance(value, dict) or not value or not depth:
        return
    of_names = all(isinstance(key, str) for key in value)
    if of_names and all(isinstance(part, Tensor) for part in value.values()):
        yield value
        return
    for part in value.values():
        yield from _state_dicts(part, depth - 1)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise SystemExit(
        "the script starts its own processes with torch.multiprocessing, but the doctor starts one for each rank, "
        "as torchrun does: give it a script that reads RANK and WORLD_SIZE"
    )
