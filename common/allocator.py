"""glibc's allocator: let it keep large blocks, instead of returning them to the system after every step.

A block that is larger than a threshold is mapped from the system by itself, and unmapped when it is freed. When it is
next used the kernel fills every page of it with zeros, one fault each. The threshold grows with the blocks that are
freed, but only to 32 MiB. At batch 256 the outputs of BasicNet's second convolution take 37.7 MB, so that a step on two
CPU cores spends more time in the kernel than any level of the ladder costs. `keep_large_blocks` raises the threshold.

A thread that allocates while others do gets an arena of its own. A block that was freed in one arena does not serve the
threads of another one, so each arena has to grow by itself. Level 01's replicas compute on threads that are new in each
run, and autograd has threads of its own. So `keep_large_blocks` asks for one arena, which all threads share.

Source: `man 3 mallopt`, and glibc's malloc/malloc.c on the dynamic threshold, malloc/arena.c on arenas.
"""

import ctypes
import os
import platform
from dataclasses import dataclass

# The parameters' numbers in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
# Bytes.
MMAP_THRESHOLD = 2**30
# What an older glibc accepts at most.
OLD_MMAP_THRESHOLD = 2**25
# The largest that mallopt can be given: an int.
TRIM_THRESHOLD = 2**31 - 1
ARENAS = 1
ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class Allocator:
    """The allocator of this process's memory on the host, and its settings.

    Attributes:
        name: such as "glibc 2.36".
        mmap_threshold: bytes from which on a block is mapped by itself; None where nothing was set.
        trim_threshold: unused bytes at the heap's end that are kept; None where nothing was set.
        arenas: how many arenas the threads share; None where nothing was set.
        note: why nothing was set, or less than was wanted; None where all was.
    """

    name: str
    mmap_threshold: int | None = None
    trim_threshold: int | None = None
    arenas: int | None = None
    note: str | None = None


def keep_large_blocks() -> Allocator:
    """Ask glibc to keep freed blocks of up to 1 GiB, in one arena of this process, and say what became of it.

    Nothing is changed where another allocator is at work, or where the environment has set glibc's. Call it before the
    first tensor: blocks that are already mapped are unmapped when they are freed.
    """
    library, version = platform.libc_ver()
    name = f"{library} {version}".strip() or platform.system()
    reason = why_not()
    if reason:
        return Allocator(name, note=reason)
    for threshold in (MMAP_THRESHOLD, OLD_MMAP_THRESHOLD):
        # The first one comes first: the trim threshold alone would hold the other at 128 KiB, which is worse.
        if set_parameter(M_MMAP_THRESHOLD, threshold):
            return _with_the_rest(name, threshold)
    return Allocator(name, note="mallopt refused M_MMAP_THRESHOLD")


def _with_the_rest(name: str, mmap_threshold: int) -> Allocator:
    """Set what has an effect only together with the first threshold."""
    note = None
    trim_threshold = None
    arenas = None
    if mmap_threshold != MMAP_THRESHOLD:
        note = "this glibc keeps blocks of up to 32 MiB only"
    if set_parameter(M_ARENA_MAX, ARENAS):
        arenas = ARENAS
    else:
        note = "mallopt refused M_ARENA_MAX"
    if set_parameter(M_TRIM_THRESHOLD, TRIM_THRESHOLD):
        trim_threshold = TRIM_THRESHOLD
    else:
        note = "mallopt refused M_TRIM_THRESHOLD"
    return Allocator(name, mmap_threshold, trim_threshold, arenas, note)


def set_parameter(parameter: int, value: int) -> bool:
    """Call glibc's mallopt; whether it accepted the value. A threshold that was set no longer grows by itself."""
    return ctypes.CDLL(None).mallopt(parameter, value) == 1


def why_not() -> str | None:
    """The reason for which the allocator is left as it is, or None."""
    if platform.libc_ver()[0] != "glibc":
        return "not glibc"
    if "malloc" in os.environ.get("LD_PRELOAD", ""):
        return "LD_PRELOAD names another allocator"
    for variable in ENVIRONMENT:
        value = os.environ.get(variable, "")
        if value and (variable != "GLIBC_TUNABLES" or "glibc.malloc" in value):
            return f"{variable} is set"
    return None
