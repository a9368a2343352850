"""Count the tensor bytes that each of N GPUs would hold, on a machine that has none.

The simulated devices are numbers; device 0 is the process's own. Within `track_memory()` every operation's result is
charged to the device on which it would be on a machine with GPUs:

- a tensor made from no other one is on the host, and not charged: datasets, batches, a model before `.to(device)`;
- `.to(device)`, `.to("cpu")` too, moves it to device 0, and `tracked_copy` to any device, such as a replica's;
- a result is where its inputs are, and inputs on the host are moved there, but for the source of a `copy_`;
- storage that FSDP resizes counts with its new size.

So a buffer that a program makes on a device, as DDP makes its buckets, is charged from its first use on. A target on
the host of a `copy_` from a device cannot be told from such a buffer, and is charged too.

Storage is rounded up to 512 bytes as CUDA's caching allocator does, and released when its last tensor dies.
"""

from common.memory.operations import label, label_activations, track_memory, tracked_copy
from common.memory.tracker import CATEGORIES, MemoryTracker

__all__ = ["CATEGORIES", "MemoryTracker", "label", "label_activations", "track_memory", "tracked_copy"]
