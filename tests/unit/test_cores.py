"""Devices made of cores: who computes on one stays on its cores, with all threads, and has as many as it has cores."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from common import cores, ladder
from common.cores import available_cores, confine_to_device, device_cores, threads_per_worker, use_all_cores
from common.processes import ranks
from tests.levels import SHORT, run_level

needs_two_cores = pytest.mark.skipif(
    available_cores() < 2 or not hasattr(os, "sched_setaffinity"), reason="two devices need two cores to be confined to"
)


def masks_of_threads() -> dict[str, str]:
    """The cores that each thread of this process may run on, as the kernel says it."""
    masks = {}
    for thread in Path("/proc/self/task").iterdir():
        (line,) = [line for line in (thread / "status").read_text().splitlines() if "Cpus_allowed_list" in line]
        masks[thread.name] = line.split(":")[1].strip()
    return masks


@pytest.fixture
def sixteen(monkeypatch):
    """A machine of eight physical cores with two hardware threads each, numbered as Linux likes to: 0 to 7, 8 to 15."""
    pinned: dict[int, set[int]] = {}

    def get(thread: int) -> set[int]:
        return pinned.get(thread or os.getpid(), set(range(16)))

    def pin(thread: int, own: list[int]) -> None:
        pinned[thread or os.getpid()] = set(own)

    monkeypatch.setattr(os, "sched_getaffinity", get, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", pin, raising=False)
    monkeypatch.setattr(cores, "_first_sibling", lambda core: core % 8)
    monkeypatch.setattr(cores, "_devices", None)
    return pinned


def test_devices_are_equal_parts_that_share_no_physical_core(sixteen):
    assert device_cores(0, 8) == [0, 8, 1, 9, 2, 10, 3, 11]
    assert device_cores(1, 8) == [4, 12, 5, 13, 6, 14, 7, 15]
    assert threads_per_worker(2) == 8 and threads_per_worker(32) == 1


def test_workers_have_their_devices_threads_however_many_they_are(sixteen):
    confine_to_device(1, 2)
    assert sixteen[os.getpid()] == {1, 9} and available_cores() == 2
    assert (threads_per_worker(2), threads_per_worker(4)) == (2, 2)
    assert device_cores(0, 2) == [0, 8]  # A part of all cores, not of those of its own device.
    use_all_cores()
    assert threads_per_worker(2) == 8
    assert set(map(len, sixteen.values())) == {16}


def look_during_training(level: str, flags: list[str]) -> tuple[dict[str, str], str, int]:
    """At the last backward of the level's training: its threads' cores, its main thread, and torch's threads.

    Torch's pool of threads has started before the process is confined: it must move too.
    """
    torch.set_num_threads(2)
    matrix = torch.randn(600, 600)  # large enough for every thread that torch has
    matrix.mm(matrix)
    seen = []

    def look(*args):
        seen.append((masks_of_threads(), str(os.getpid()), torch.get_num_threads()))
        return backward(*args)

    backward = torch.Tensor.backward
    with mock.patch.object(torch.Tensor, "backward", look):
        run_level(level, flags)
    return seen[-1]


QUICK = ("01_data_parallel", "02_ddp_raw")
LEVELS = [pytest.param(level, marks=[] if level in QUICK else [pytest.mark.slow]) for level in ladder.LEVELS]


@needs_two_cores
@pytest.mark.parametrize("level", LEVELS)
def test_every_thread_of_a_level_is_on_its_device(level):
    """At level 01 the replicas' threads are those of one process, each on its own device."""
    flags = [*SHORT, "--cores-per-device", "1"]
    processes = 2 if level in ladder.DISTRIBUTED else 1
    every = available_cores()
    for rank, (masks, main, threads) in enumerate(ranks(processes).run(look_during_training, level, flags)):
        own, other = (str(*device_cores(device, 1)) for device in (rank, 1 - rank))
        assert masks[main] == own and threads == 1 and len(masks) > 1
        assert set(masks.values()) == ({own, other} if level == "01_data_parallel" else {own})
    assert ranks(processes).run(available_cores) == [every] * processes
