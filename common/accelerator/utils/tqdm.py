"""A progress bar that only one process of each machine shows."""

from typing import Any

from ..state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A bar of the library tqdm with these arguments, shown by local rank 0 only unless `main_process_only` is off.

    Raises:
        ImportError: where tqdm is not installed.
        ValueError: for True or False as the first argument, which was once `main_process_only`.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        message = "Passing `True` or `False` as the first argument to `tqdm` is unsupported"
        raise ValueError(f"{message}: use the `main_process_only` keyword argument")
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = not PartialState().is_local_main_process
    return bar(*args, **kwargs, disable=disable)
