"""Observers of single calls: collectives on all ranks, `torch.save`, and processes that a script starts itself."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from common.doctor.record import Record, Save
from common.doctor.watcher import Watcher
from common.process_group import COLLECTIVES

ON_ALL_RANKS = (*COLLECTIVES, "barrier", "monitored_barrier")
CALLS = 100_000
DEPTH = 3  # at which a state dict lies in what is saved


def watch_collectives(watcher: Watcher, before_all_reduce: Callable[[Tensor], None]) -> None:
    for name in ON_ALL_RANKS:
        setattr(dist, name, _noted_collective(watcher, name, getattr(dist, name), before_all_reduce))


def _noted_collective(
    watcher: Watcher, name: str, call: Callable, before_all_reduce: Callable[[Tensor], None]
) -> Callable:
    parameters = inspect.signature(call)
    calls = watcher.record.collectives

    @watcher.observer
    def note_collective(args: tuple, kwargs: dict) -> None:
        arguments = parameters.bind(*args, **kwargs).arguments
        group = arguments.get("group")
        on_all_ranks = group is None or group is dist.group.WORLD
        if name == "all_reduce" and on_all_ranks:
            before_all_reduce(arguments["tensor"])
        if on_all_ranks and dist.is_initialized() and len(calls) < CALLS:
            line, *_ = watcher.place(sys._getframe()) or ["?"]
            calls.append((name, line))
            watcher.keep()

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note_collective(args, kwargs)
        return call(*args, **kwargs)

    return noted


def watch_end_of_group(watcher: Watcher, before: Callable[[], None]) -> None:
    """Call `before` when the process group is destroyed: the last moment at which most scripts still have a network."""
    destroy = dist.destroy_process_group
    observed = watcher.observer(before)

    @functools.wraps(destroy)
    def noted(*args: Any, **kwargs: Any) -> None:
        observed()
        destroy(*args, **kwargs)

    dist.destroy_process_group = noted


def watch_saves(watcher: Watcher) -> None:
    save = torch.save

    @watcher.observer
    def note_save(value: Any, file: Any) -> None:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if isinstance(path, str | os.PathLike):
            keys = [key for state in _state_dicts(value, DEPTH) for key in state]
            prefixed = [key for key in keys if key.startswith("module.")]
            file_on_disk = str(Path(path).resolve())
            watcher.record.saves.append(Save(file_on_disk, len(keys), len(prefixed)))

    @functools.wraps(save)
    def noted(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        note_save(obj, f)
        save(obj, f, *args, **kwargs)

    torch.save = noted


def _state_dicts(value: Any, depth: int) -> Iterator[dict[str, Tensor]]:
    if not isinstance(value, dict) or not value or not depth:
        return
    of_names = all(isinstance(key, str) for key in value)
    if of_names and all(isinstance(part, Tensor) for part in value.values()):
        yield value
        return
    for part in value.values():
        yield from _state_dicts(part, depth - 1)


def refuse_own_processes(record: Record) -> None:
    """A script that starts its own processes is run by `python`: torchrun would start them once per rank."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        record.starts_processes = True
        raise SystemExit("the script starts its own processes")

    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, refuse)
