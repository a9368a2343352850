"""Count the memory of each device of the emulated DataParallel.

`common.memory` follows one thread. The emulation has a thread for each replica, and copies tensors
between replicas, so three functions are replaced while memory is tracked: its copy, its gather, and the start of a job
on a thread.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from common.memory import MemoryTracker, observed, track_memory, tracked_copy
from common.nested import leaves
from common.small import data_parallel


@contextmanager
def track_replicas() -> Iterator[MemoryTracker]:
    """`track_memory` of a process that may have replicas, on all of their threads."""
    gather = data_parallel.gather
    submit = ThreadPoolExecutor.submit

    def copy_of_replica(tensor: Tensor, source: int, target: int) -> Tensor:
        category = "parameters" if isinstance(tensor, nn.Parameter) else "communication"
        return tracked_copy(tensor, source, target, category)

    def gather_and_label(outputs: list[Any]) -> Any:
        gathered = gather(outputs)
        for leaf in leaves(gathered):
            if isinstance(leaf, Tensor):
                tracker.label(leaf, "communication")
        return gathered

    def submit_observed(pool: ThreadPoolExecutor, job: Callable, *args, **kwargs) -> Future:
        return submit(pool, observed(tracker)(job), *args, **kwargs)

    with (
        track_memory() as tracker,
        patch.object(data_parallel, "copy_to", copy_of_replica),
        patch.object(data_parallel, "gather", gather_and_label),
        patch.object(ThreadPoolExecutor, "submit", submit_observed),
    ):
        yield tracker
