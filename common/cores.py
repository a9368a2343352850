"""The CPU cores that this process may use, and devices made of them where there are no GPUs.

GPUs cannot be shared out; cores can. Where levels are compared without GPUs, a *device* is therefore an equal part of
the cores: a process or replica that computes on it has one thread for each of these cores, and stays on them. No
process is confined to cores until `confine_to_device` is called, as the flag `--cores-per-device` does.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_THREADS = Path("/proc/self/task")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class _Devices(NamedTuple):
    """The devices of which this process has one: `cores` in their order, `cores_per_device` of them for each device."""

    cores: list[int]
    cores_per_device: int


_devices: _Devices | None = None  # None: this process is not confined to a device


def available_cores() -> int:
    """The CPU cores this process is allowed to run on; where the system cannot tell (macOS, Windows), all there are.

    A limit of CPU time (`docker --cpus 2`, `resources.limits.cpu` of Kubernetes) leaves a process all cores, and is not
    seen here. Name the cores instead: `docker --cpuset-cpus 0,1`.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_worker(workers: int) -> int:
    """The number of threads of each of `workers` on this machine: its device's cores, else an equal share of all."""
    if _devices is not None:
        return _devices.cores_per_device
    return max(1, available_cores() // workers)


def device_cores(index: int, cores_per_device: int) -> list[int]:
    """The numbers of the cores of device `index`; an empty list where the system cannot confine a thread to cores.

    With 2 cores per device, device 0 has the first two that this process may use, device 1 the next two. The hardware
    threads of one physical core stand side by side in this order, so that two devices share none if they need not.
    """
    start = index * cores_per_device
    return _cores_of_all_devices()[start : start + cores_per_device]


def confine_to_device(index: int, cores_per_device: int) -> None:
    """Let all threads of this process, and those that they start, run on the cores of device `index` only.

    The caller sets the number of torch's threads: see `threads_per_worker`. macOS and Windows cannot confine threads to
    cores, so there that number is all that makes a device.
    """
    global _devices
    _devices = _Devices(_cores_of_all_devices(), cores_per_device)
    _pin_all_threads(device_cores(index, cores_per_device))


def confine_thread_to_device(index: int) -> None:
    """Move the calling thread to another device than the process's, if the process is confined to a device."""
    if _devices is not None:
        _pin(0, device_cores(index, _devices.cores_per_device))


def use_all_cores() -> None:
    """Undo `confine_to_device`, for all threads of this process."""
    global _devices
    if _devices is not None:
        _pin_all_threads(_devices.cores)
        _devices = None


def _cores_of_all_devices() -> list[int]:
    """The cores that this process may use, or could use before it was confined to one device."""
    if _devices is not None:
        return _devices.cores
    if not hasattr(os, "sched_setaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=lambda core: (_first_sibling(core), core))


def _first_sibling(core: int) -> int:
    """The first hardware thread of the physical core that `core` is a thread of: of "3,19" or "3-4", 3."""
    path = Path(_SIBLINGS.format(core))
    if not path.exists():
        return core
    return int(path.read_text().replace("-", ",").partition(",")[0])


def _pin_all_threads(cores: Iterable[int]) -> None:
    """Pin the threads of a running pool too: a thread keeps the cores that its creator had when it started."""
    threads = [0]
    if _THREADS.exists():
        threads = [int(path.name) for path in _THREADS.iterdir()]
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # The thread has ended meanwhile.
            _pin(thread, cores)


def _pin(thread: int, cores: Iterable[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(thread, cores)
