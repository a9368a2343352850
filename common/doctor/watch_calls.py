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

from common.doctor.record import Call, Save
from common.doctor.script_line import script_line
from common.doctor.watcher import Watcher
from common.process_group import COLLECTIVES

ON_ALL_RANKS = (*COLLECTIVES, "barrier", "monitored_barrier")


def install(watcher: Watcher, script: Path) -> None:
    for name in ON_ALL_RANKS:
        _watch_collective(watcher, name, script)
    _watch_saves(watcher)
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, _refuse)


def _watch_collective(watcher: Watcher, name: str, script: Path) -> None:
    parameters = inspect.signature(getattr(dist, name))

    def note_collective(*args: Any, **kwargs: Any) -> None:
        group = parameters.bind(*args, **kwargs).arguments.get("group")
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            place = script_line(sys._getframe(), script)
            watcher.record.collectives.append(Call(name, place.line if place else "?"))
            watcher.keep()

    watcher.watch(dist, name, before=note_collective)


def _watch_saves(watcher: Watcher) -> None:
    def note_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = getattr(f, "name", f)  # of an open file, or itself
        if isinstance(path, str | os.PathLike):
            keys: list[str] = []
            for state in _state_dicts(obj):
                keys.extend(map(str, state))
            watcher.record.saves.append(Save(str(Path(path).resolve()), keys))

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
