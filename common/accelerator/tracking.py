"""Experiment trackers behind one interface: TensorBoard, JSON lines, or one of your own.

The Accelerator starts, feeds and finishes them on the main process only. A tracker's package is imported when its run
starts, never before.
"""

import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .state import PartialState
from .utils.imports import is_tensorboard_available


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a tracker's method run on the main process only, if the tracker's `main_process_only` says so."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return run


class GeneralTracker:
    """The interface of every tracker; derive from it, or give an object with the same methods.

    A subclass defines `name`, `requires_logging_directory`, which is true if its constructor takes the folder second,
    and `tracker`, the underlying run. Methods decorated with `on_main_process` run on rank 0 alone, wherever they are
    called, unless `main_process_only` is False.

    Args:
        _blank: make one that takes every call and does nothing. It answers `get_tracker` where no tracker runs.

    Raises:
        NotImplementedError: naming what a subclass lacks.
    """

    main_process_only = True
    # Declared, and left to subclasses to define.
    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        required = ("name", "requires_logging_directory", "tracker")
        # Not hasattr: `tracker` may be a property that answers only when the run has started.
        missing = [f"`{name}`" for name in required if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"The implementation of {type(self).__name__} is missing the following required attributes: "
                f"{', '.join(missing)}"
            )

    def start(self) -> None:
        """Open the run. Called by `init_trackers`, when the process group exists."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's hyperparameters: names to bool, int, float, str or None."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log names to numbers or text at `step`."""

    def finish(self) -> None:
        """Close the run."""


class JSONLinesTracker(GeneralTracker):
    """One JSON object a line in `<logging_dir>/<run_name>.jsonl`: first {"config": …}, then {"step": …, name: value}.

    Lines are appended, so that a resumed run continues its file, and `log` hands each to the operating system. NaN and
    infinities are written as Python's json reads them; other objects, such as paths, are their text.
    """

    name = "jsonl"
    requires_logging_directory = True
    tracker: Any = None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.jsonl"

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.tracker = self.path.open("a", buffering=1, encoding="utf-8")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write `values` under "config"."""
        self._write({"config": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write `values`, and `kwargs` beside them. With a `step`, a value of that name becomes "values.step"."""
        row = {**values, **kwargs}
        if step is not None and "step" in row:
            row["values.step"] = row.pop("step")
        self._write({"step": step, **row})

    def finish(self) -> None:
        self.tracker.close()

    def _write(self, row: dict[str, Any]) -> None:
        self.tracker.write(json.dumps(to_python_values(row), default=str) + "\n")


class TensorBoardTracker(GeneralTracker):
    """Event files in `<logging_dir>/<run_name>`.

    Args:
        kwargs: of `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    writer: Any = None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The SummaryWriter, or None before the run has started."""
        return self.writer

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show `values` as hyperparameters; lists, paths and such as text."""
        hyperparameters = {}
        for name, value in to_python_values(values).items():
            is_plain = value is None or isinstance(value, (bool, int, float, str))
            hyperparameters[name] = value if is_plain else str(value)
        self.writer.add_hparams(hyperparameters, metric_dict={})
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers, dicts of numbers and texts; `kwargs` are of `add_scalar`, `add_scalars` and `add_text`."""
        for name, value in to_python_values(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict) and set(map(type, value.values())) <= {bool, int, float}:
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                # Python shows the same warning once.
                warnings.warn(f"tensorboard cannot log {name!r} of {type(value)}: it is skipped", stacklevel=3)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Show batches of images, (n, 3, height, width) or as `kwargs` of `add_images` say."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        self.writer.close()


LOGGER_TYPE_TO_CLASS: dict[str, Any] = {"tensorboard": TensorBoardTracker, "jsonl": JSONLinesTracker}


def get_available_trackers() -> list[str]:
    """Names of the trackers of other packages that are installed: what "all" stands for."""
    return ["tensorboard"] if is_tensorboard_available() else []


def select_trackers(log_with: Any, logging_dir: str | os.PathLike | None = None) -> list[Any]:
    """The trackers that `log_with` asks for, without repeats: names that can be started, and objects as given.

    Args:
        log_with: None, a name, "all" (whatever is installed, if there is a `logging_dir`), an object with the tracker's
            methods, or a list of these.

    Raises:
        ValueError: for an unknown name or a missing `logging_dir`.
        ImportError: for a package that is not installed.
    """
    if log_with is None:
        return []
    wanted = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    if "all" in wanted:
        installed = get_available_trackers() if logging_dir is not None else []
        wanted = [each for each in wanted if each != "all"] + installed
    chosen: list[Any] = []
    for each in wanted:
        if isinstance(each, str):
            _require_can_start(each, logging_dir)
        if each not in chosen:
            chosen.append(each)
    if not chosen:
        warnings.warn(f"`log_with={log_with}`: no such tracker is installed, or `logging_dir` is missing", stacklevel=3)
    return chosen


def _require_can_start(name: str, logging_dir: str | os.PathLike | None) -> None:
    if name not in LOGGER_TYPE_TO_CLASS:
        known = ["all", *LOGGER_TYPE_TO_CLASS]
        hint = "or pass an object with the tracker's methods"
        raise ValueError(f"Unsupported logging capability: {name}. Choose between {known}, {hint}")
    if name == "tensorboard" and not is_tensorboard_available():
        raise ImportError("log_with='tensorboard' needs a package that is not installed: pip install tensorboard")
    if logging_dir is None:
        hint = "give the Accelerator a project_dir or a logging_dir"
        raise ValueError(f"Logging with `{name}` requires a `logging_dir` to be passed in: {hint}")


def to_python_values(value: Any) -> Any:
    """Nested `value` in dicts and lists, with Python numbers and lists in place of tensors and arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {name: to_python_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_python_values(item) for item in value]
    return value
