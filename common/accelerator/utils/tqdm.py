"""A progress bar that only one process of each machine shows."""

from typing import Any

from ..state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A bar of the library tqdm with these arguments, shown by local rank 0 only unless `main_process_only` is off.

    Raises:
        ImportError: where tqdm is not installed.
    """
    from tqdm.auto import tqdm as bar

    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=disable)
