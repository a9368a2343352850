"""The load that other programs put on this machine's cores: a number from a busy machine says little."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
# Of the cores; with more, rows become noisy.
MOST = 0.2
# What a user may have set about how threads wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def busy_cores(seconds: float = 1.0) -> float | None:
    """The mean number of busy cores for so long, of those that this process may use; None where nobody counts.

    This process sleeps meanwhile. Its ranks, if it has any, must have nothing to do either.
    """
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    busy = 0.0
    for core, (worked, passed) in after.items():
        worked_before, passed_before = before[core]
        if passed > passed_before:
            busy += (worked - worked_before) / (passed - passed_before)
    return busy if after else None


def _ticks() -> dict[int, tuple[int, int]]:
    """Of each of our cores since the machine has started: the clock ticks in which it worked, and all that passed."""
    if not STAT.exists() or not hasattr(os, "sched_getaffinity"):
        return {}
    ours = os.sched_getaffinity(0)
    found = {}
    for line in STAT.read_text().splitlines():
        name, *counts = line.split()
        core = name.removeprefix("cpu")
        if core.isdecimal() and int(core) in ours:
            # Linux: user, nice, system, idle, iowait, irq, softirq, steal. What guests use is in user already.
            ticks = [int(count) for count in counts[:8]]
            idle = ticks[3] + ticks[4]
            found[int(core)] = (sum(ticks) - idle, sum(ticks))
    return found


def is_busy(cores: float | None, of: int) -> bool:
    """Are so many busy `cores`, `of` all, enough to make timings noisy?"""
    return cores is not None and cores > MOST * of


def wait_passively() -> bool:
    """Let processes that this one starts give their core away while their threads wait; False where the user decides.

    Threads of OpenMP spin while they wait for one another. That is fast where each has a core. Where another program
    computes on it, they spin for a thread that does not run.
    """
    if any(name in os.environ for name in WAITING):
        return False
    os.environ["OMP_WAIT_POLICY"] = "passive"
    return True


def what_is_slowed(busy: dict[str, float | None], cores: int) -> str | None:
    """A sentence on a comparison of the levels beside other programs; None for a quiet machine.

    Args:
        busy: the `busy_cores` "before" and "after" it.
        cores: that the comparison may use.
    """
    moments = {when: count for when, count in busy.items() if is_busy(count, cores)}
    if not moments:
        return None
    counts = " and ".join(f"{count:.1f} of {cores} cores {when}" for when, count in moments.items())
    return f"BUSY: others used {counts} the comparison. Stop the other programs and compare again."
