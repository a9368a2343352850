"""Count the memory of each device of the emulated DataParallel.

`common.memory` follows one thread. The emulation has a thread for each replica, and copies tensors between replicas, so
three of its functions are replaced by those below while memory is tracked.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from common.memory import MemoryTracker, label, label_activations, track_memory, tracked_copy
from common.nested import leaves
from common.small import data_parallel
from common.small.data_parallel import gather, replicate


@contextmanager
def track_replicas() -> Iterator[MemoryTracker]:
    """`track_memory` of a process that may have replicas, on all of their threads."""
    with track_memory() as tracker:
        tracked_replicate = partial(replicate_tracked, tracker)
        with patch.multiple(data_parallel, copy_to=copy_tracked, replicate=tracked_replicate, gather=gather_tracked):
            yield tracker


def copy_tracked(tensor: Tensor, source: int, target: int) -> Tensor:
    category = "parameters" if isinstance(tensor, nn.Parameter) else "communication"
    return tracked_copy(tensor, source, target, category)


def replicate_tracked(tracker: MemoryTracker, module: nn.Module, n: int) -> list[Callable]:
    """The replicas, each of which enters, when it is called on its thread, what tracks this one."""
    # Modes are of one thread: the tracker's and, in `your_network`, that in which nothing is computed.
    modes = _get_current_dispatch_mode_stack()
    # A mode of torch keeps what its end restores, last in, first out. So one thread at a time enters it.
    one_at_a_time = threading.Lock()

    def call(replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time, ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            entered.enter_context(label_activations(tracker))
            return replica(*args, **kwargs)

    return [partial(call, replica) for replica in replicate(module, n)]


def gather_tracked(outputs: list[Any]) -> Any:
    gathered = gather(outputs)
    for leaf in leaves(gathered):
        if isinstance(leaf, Tensor):
            label(leaf, "communication")
    return gathered
