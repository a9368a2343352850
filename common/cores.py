"""The CPU cores that this process may use."""

import os


def available_cores() -> int:
    """The CPU cores this process is allowed to run on; where the system cannot tell (macOS, Windows), all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
