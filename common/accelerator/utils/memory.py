"""Out of memory: let go of it, or try again with less."""

import functools
import gc
from collections.abc import Callable

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back to the driver, after a garbage collection if asked."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_memory(*objects) -> list[None]:
    """As many Nones as there are `objects`, to be assigned to their names: `a, b = release_memory(a, b)`.

    The memory is free once nothing else refers to the objects.
    """
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether `exception` says that CPU, CUDA or MPS memory ran out, or that cuDNN cannot do this size."""
    complaints = (" out of memory", "CUDNN_STATUS_NOT_SUPPORTED.", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(exception, RuntimeError) and any(complaint in str(exception) for complaint in complaints)


def find_executable_batch_size(function=None, starting_batch_size: int = 128, reduce_batch_size_fn=None) -> Callable:
    """Call `function(batch_size, …)`, and again with a smaller batch each time memory runs out.

    The size shrinks by a tenth, or to what `reduce_batch_size_fn()` returns; one that worked is kept for later calls.

    Raises:
        RuntimeError: when the size reaches zero.
        TypeError: if the batch size is passed as well, for then there is one argument too many.
    """
    if function is None:
        return lambda wrapped: find_executable_batch_size(wrapped, starting_batch_size, reduce_batch_size_fn)
    batch_size = starting_batch_size

    @functools.wraps(function)
    def run(*args, **kwargs):
        nonlocal batch_size
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Out of the except block, whose traceback would keep the failed attempt's tensors alive.
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn else int(batch_size * 0.9)
        raise RuntimeError("No executable batch size found, reached zero.")

    return run
