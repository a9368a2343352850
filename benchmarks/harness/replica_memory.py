"""Count the memory of each device of the emulated DataParallel.

`common.memory` follows one thread. The emulation has a thread for each replica, and copies tensors between replicas, so
three of its functions are replaced while memory is tracked.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from common.memory import MemoryTracker, label_activations, track_memory, tracked_copy
from common.nested import leaves
from common.small import data_parallel
from common.small.data_parallel import EmulatedDataParallel


@contextmanager
def track_replicas() -> Iterator[MemoryTracker]:
    """`track_memory` of a process that may have replicas, on all of their threads."""
    parallel_apply = EmulatedDataParallel.parallel_apply
    gather = data_parallel.gather
    # A mode of torch keeps what its end restores, last in, first out. So one thread at a time enters it.
    one_at_a_time = threading.Lock()

    def copy_of_replica(tensor: Tensor, source: int, target: int) -> Tensor:
        category = "parameters" if isinstance(tensor, nn.Parameter) else "communication"
        return tracked_copy(tensor, source, target, category)

    def apply_tracked(model: EmulatedDataParallel, replicas: list[nn.Module], shards: list[tuple]) -> list[Any]:
        # Modes are of one thread, so a replica's enters those of this one: the tracker's and, in `your_network`, that
        # in which nothing is computed.
        modes = _get_current_dispatch_mode_stack()

        def call(replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with one_at_a_time, ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode)
                entered.enter_context(label_activations(tracker))
                return replica(*args, **kwargs)

        return parallel_apply(model, [partial(call, replica) for replica in replicas], shards)

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
