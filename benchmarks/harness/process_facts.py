"""Facts of a process that its times depend on beside its work: its threads, its allocator and its cores."""

from dataclasses import asdict

import torch

from common.allocator import keep_large_blocks
from common.cores import available_cores

CORES_AT_START = available_cores()


def process_facts() -> dict:
    """Facts of a row whose work is done by this process, or by processes that are all set like this one.

    They are "threads_per_process", the "allocator" and "pinned_to_cores": whether the process has confined itself to
    fewer cores than it was started with. The allocator is asked again to keep large blocks. That changes nothing in a
    process of the benchmarks, because each of them asks before its first tensor.
    """
    return {
        "threads_per_process": torch.get_num_threads(),
        "allocator": asdict(keep_large_blocks()),
        "pinned_to_cores": available_cores() < CORES_AT_START,
    }
