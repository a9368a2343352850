"""Count the memory of each device of the emulated DataParallel.

`common.memory` follows one thread. The emulation has a thread for each replica, and copies tensors between replicas, so
three of its functions are replaced while memory is tracked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from common.memory import MemoryTracker, track_memory, track_this_thread, tracked_copy
from common.nested import leaves
from common.small import data_parallel
from common.small.data_parallel import EmulatedDataParallel


@contextmanager
def track_replicas() -> Iterator[MemoryTracker]:
    """`track_memory` of a process that may have replicas, on all of their threads."""
    parallel_apply = EmulatedDataParallel.parallel_apply
    gather = data_parallel.gather

    def copy_of_replica(tensor: Tensor, source: int, target: int) -> Tensor:
        category = "parameters" if isinstance(tensor, nn.Parameter) else "communication"
        return tracked_copy(tensor, source, target, category)

    def apply_tracked(model: EmulatedDataParallel, replicas: list[nn.Module], shards: list[tuple]) -> list[Any]:
        tracked = track_this_thread(tracker)  # as a decorator: a replica's thread enters it when it calls the replica
        return parallel_apply(model, [tracked(replica) for replica in replicas], shards)

    def gather_and_label(outputs: list[Any]) -> Any:
        gathered = gather(outputs)
        for leaf in leaves(gathered):
            if isinstance(leaf, Tensor):
                tracker.label(leaf, "communication")
        return gathered

    with (
        track_memory() as tracker,
        patch.object(data_parallel, "copy_to", copy_of_replica),
        patch.object(EmulatedDataParallel, "parallel_apply", apply_tracked),
        patch.object(data_parallel, "gather", gather_and_label),
    ):
        yield tracker
