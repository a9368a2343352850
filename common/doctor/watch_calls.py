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

from common.doctor.watcher import Watcher
from common.process_group import COLLECTIVES

ON_ALL_RANKS = (*COLLECTIVES, "barrier", "monitored_barrier")


def install(watcher: Watcher) -> None:
    for name in ON_ALL_RANKS:
        _watch_collective(watcher, name)
    _watch_saves(watcher)
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, _refuse)


def _watch_collective(watcher: Watcher, name: str) -> None:
    parameters = inspect.signature(getattr(dist, name))
    calls = watcher.record.collectives

    def note_collective(*args: Any, **kwargs: Any) -> None:
        group = parameters.bind(*args, **kwargs).arguments.get("group")
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            place = watcher.place(sys._getframe())
            calls.append((name, place[0] if place else "?"))
            watcher.keep()

    watcher.watch(dist, name, before=note_collective)


def _watch_saves(watcher: Watcher) -> None:
    def note_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(f, "name", f)  # of an open file, or itself
        if isinstance(path, str | os.PathLike):
            keys = [str(key) for state in _state_dicts(obj) for key in state]
            watcher.record.saves.append((str(Path(path).resolve()), keys))

    watcher.watch(torch, "save", before=note_save)


def _state_dicts(value: Any) -> Iterator[dict[str, Tensor]]:
    if not isinstance(value, dict) or not value:
        return
    if all(isinstance(part, Tensor) for part in value.values()):
        yield value
        return
    for part in value.values():
        yield from _state_dicts(part)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise SystemExit(
        "the script starts its own processes with torch.multiprocessing, but the doctor starts one for each rank, "
        "as torchrun does: give it a script that reads RANK and WORLD_SIZE"
    )
