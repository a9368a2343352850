"""Running out of memory: free it, or try again with a smaller batch."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

# What RuntimeErrors say when memory ran out on CUDA, on Apple's GPU and on the CPU, or where cuDNN cannot do this size.
OUT_OF_MEMORY_MESSAGES = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)
SHRINKING_FACTOR = 0.9


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back to the driver, after a garbage collection if asked."""
    if garbage_collection:
        gc.collect()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many Nones as there are `objects`, to be assigned to their names: `a, b = release_memory(a, b)`.

    The names hold the objects until that assignment. After it torch can use their memory again, if nothing else refers
    to them. What this call gives back to the driver was free before.
    """
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def should_reduce_batch_size(exception: Exception) -> bool:
    """True if `exception` says that CPU, CUDA or MPS memory ran out, or that cuDNN cannot do this size."""
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    text = str(exception.args[0])
    return any(message in text for message in OUT_OF_MEMORY_MESSAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Wrap `function(batch_size, …)`, so that it is called again with a smaller batch each time memory runs out.

    The wrapper takes the arguments after the size. The size shrinks by a tenth, or to what `reduce_batch_size_fn()`
    returns; one that worked is kept for later calls. If no `function` is given, a decorator is returned.

    Raises:
        RuntimeError: when the size reaches zero.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        while batch_size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Not in the except block: its traceback would keep the tensors of the failed attempt alive.
            batch_size = reduce_batch_size_fn() if reduce_batch_size_fn else int(batch_size * SHRINKING_FACTOR)
        raise RuntimeError("No executable batch size found, reached zero.")

    return run
