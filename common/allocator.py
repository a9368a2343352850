"""Settings of glibc's allocator by which it keeps large blocks, and does not return them to the system at each step.

A block that is larger than a threshold is mapped from the system by itself, and unmapped when it is freed. When it is
next used the kernel fills every page of it with zeros. The threshold grows with the blocks that are freed, but only to
32 MiB, and at batch 256 the outputs of BasicNet's second convolution take 37.7 MB. `keep_large_blocks` raises it.

A thread that allocates while others do gets an arena of its own, which does not serve the threads of other arenas.
Level 01's replicas and autograd have threads of their own. So `keep_large_blocks` asks for one arena for all threads.

Source: `man 3 mallopt`, and glibc's malloc/malloc.c on the dynamic threshold, malloc/arena.c on arenas.
"""

import ctypes
import os
import platform

# Numbers of the parameters in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD = 2**30  # bytes
OLD_MMAP_THRESHOLD = 2**25  # bytes; glibc before 2.35 accepts no more
TRIM_THRESHOLD = 2**31 - 1  # bytes; the largest int, which mallopt takes
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")


def keep_large_blocks() -> None:
    """Ask glibc to keep freed blocks of up to 1 GiB, in one arena of this process.

    Nothing is changed where another allocator is at work, or where the environment has set glibc's. Call it before the
    first tensor: blocks that are already mapped are unmapped when they are freed.
    """
    if not is_untouched_glibc():
        return
    # This one comes first: the trim threshold alone would hold it at 128 KiB, which is worse.
    accepted = set_parameter(M_MMAP_THRESHOLD, MMAP_THRESHOLD) or set_parameter(M_MMAP_THRESHOLD, OLD_MMAP_THRESHOLD)
    if accepted:
        set_parameter(M_ARENA_MAX, 1)
        set_parameter(M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def set_parameter(parameter: int, value: int) -> bool:
    """Call glibc's mallopt, and return if it accepted the value. A threshold that was set no longer grows by itself."""
    return ctypes.CDLL(None).mallopt(parameter, value) == 1


def is_untouched_glibc() -> bool:
    """True if glibc's allocator is at work, and the environment has not set it."""
    if platform.libc_ver()[0] != "glibc" or "malloc" in os.environ.get("LD_PRELOAD", ""):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    return not any(os.environ.get(variable) for variable in VARIABLES)
