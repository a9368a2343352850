"""Experiment trackers behind one interface: TensorBoard, Weights & Biases, JSON lines, or one of your own.

The Accelerator starts, feeds and finishes them on the main process only. A tracker's package is imported when its run
starts, never before.
"""

import functools
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .state import PartialState
from .utils.imports import is_tensorboard_available, is_wandb_available


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

    A subclass defines `name`, `requires_logging_directory` (is the folder the second argument of the constructor?) and
    `tracker`, the underlying run. `main_process_only` says whether methods decorated with `on_main_process` run on rank
    0 alone, wherever they are called.

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

    Lines are appended, so that a resumed run continues its file, and are on disk when `log` returns. NaN and infinities
    are the texts "nan", "inf" and "-inf", which JSON has no numbers for; other objects, such as paths, are their text.
    """

    name = "jsonl"
    requires_logging_directory = True
    tracker: Any = None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.jsonl"

    def start(self) -> None:
        """Open the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.tracker = self.path.open("a", buffering=1, encoding="utf-8")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write `values` under "config"."""
        self._write({"config": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write `values`, and `kwargs` beside them."""
        self._write({"step": step, **values, **kwargs})

    def finish(self) -> None:
        """Close the file."""
        self.tracker.close()

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(plain(row, _finite_number_or_text), allow_nan=False, default=str)
        self.tracker.write(line + "\n")


class TensorBoardTracker(GeneralTracker):
    """Event files in `<logging_dir>/<run_name>`.

    Args:
        kwargs: of `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    tracker: Any = None  # the SummaryWriter

    def __init__(self, run_name: str, logging_dir: str | os.PathLike, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self.init_kwargs = kwargs

    def start(self) -> None:
        """Open the event file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            from tensorboardX import SummaryWriter  # type: ignore[assignment, no-redef]

        self.tracker = self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Show `values` as hyperparameters, and write them to `<time>/hparams.yml`; lists, paths and such as text."""
        import yaml

        values = {name: _number_or_text(value) for name, value in plain(values).items()}
        self.writer.add_hparams(values, metric_dict={})
        self.writer.flush()
        folder = Path(self.logging_dir, str(time.time()))
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "hparams.yml", "w", encoding="utf-8") as file:
            yaml.safe_dump(values, file)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add numbers as scalars, texts as texts and dicts of numbers as scalars of one figure.

        Args:
            kwargs: of `add_scalar`, `add_text` and `add_scalars`.
        """
        for name, value in plain(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif _is_figure(value):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                # Python shows the same warning once.
                kind = type(value).__name__
                warnings.warn(f"tensorboard cannot log {name!r} as {kind}: it is skipped", stacklevel=3)
        self.writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


class WandBTracker(GeneralTracker):
    """A Weights & Biases run in the project `run_name`.

    Args:
        kwargs: of `wandb.init`.
    """

    name = "wandb"
    requires_logging_directory = False
    # wandb can take values from several processes at once.
    main_process_only = False
    tracker: Any = None  # the wandb.Run

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    def start(self) -> None:
        """Open the run."""
        import wandb

        self.tracker = self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep `values` with the run; what is no number as text."""
        import wandb

        wandb.config.update(plain(values, _number_or_text), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log `values` at `step`; `kwargs` are of the run's `log`."""
        self.run.log(values, step=step, **kwargs)

    def finish(self) -> None:
        """Close the run."""
        self.run.finish()


LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "jsonl": JSONLinesTracker,
}
_IS_AVAILABLE = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker of your own known by its `name`, for `log_with`, before the Accelerator is made.

    `init_trackers` makes it with the project's name, then with the logging directory if `requires_logging_directory`,
    and with its `init_kwargs`. It warns if the name is taken.

    Raises:
        ValueError: for what is no subclass of GeneralTracker, or lacks `name` or `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"`tracker_class` must be a subclass of `GeneralTracker`, but got {tracker_class}.")
    name = getattr(tracker_class, "name", None)
    if not name:
        raise ValueError("The tracker class to register must define a non-empty `name` attribute.")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError("The tracker class to register must define a `requires_logging_directory` class attribute.")
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"A tracker with the name '{name}' is already registered and will be overwritten by {tracker_class}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[str]:
    """Names of the trackers whose packages are installed."""
    return [name for name, is_available in _IS_AVAILABLE.items() if is_available()]


def select_trackers(log_with: Any, logging_dir: str | os.PathLike | None = None) -> list[Any]:
    """The trackers that `log_with` asks for, without repeats: classes in place of names, and objects as given.

    Args:
        log_with: None, a name, "all" (whatever is installed and, without a `logging_dir`, needs none), an object with
            the tracker's methods, or a list of these.

    Raises:
        ValueError: for an unknown name or a missing `logging_dir`.
        ImportError: for a package that is not installed.
    """
    if log_with is None:
        return []
    chosen: list[Any] = []
    for wanted in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        if wanted == "all":
            classes = [LOGGER_TYPE_TO_CLASS[name] for name in get_available_trackers()]
            found = [each for each in classes if logging_dir is not None or not each.requires_logging_directory]
        elif isinstance(wanted, str):
            found = [_tracker_class(str(wanted), logging_dir)]
        else:
            found = [wanted]
        chosen += [each for each in found if each not in chosen]
    if not chosen:
        warnings.warn(f"`log_with={log_with}` was passed, but no tracker of these is there", stacklevel=3)
    return chosen


def _tracker_class(name: str, logging_dir: str | os.PathLike | None) -> type[GeneralTracker]:
    if name not in LOGGER_TYPE_TO_CLASS:
        known = ["all", *LOGGER_TYPE_TO_CLASS]
        raise ValueError(
            f"Unsupported logging capability: {name}. Choose between {known}, register your own class, or pass an "
            "object with the tracker's methods"
        )
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    # A class that was registered in place of a built-in one may not need its package.
    needs_package = tracker_class in (TensorBoardTracker, WandBTracker)
    if needs_package and name not in get_available_trackers():
        raise ImportError(f"log_with={name!r} needs a package that is not installed: pip install {name}")
    if tracker_class.requires_logging_directory and logging_dir is None:
        raise ValueError(
            f"Logging with `{name}` requires a `logging_dir` to be passed in: give the Accelerator a project_dir or a "
            "logging_dir"
        )
    return tracker_class


# Values


def plain(value: Any, convert: Callable[[Any], Any] | None = None) -> Any:
    """Nested `value` in dicts and lists, with Python numbers and lists in place of tensors and arrays.

    Args:
        convert: applied to each number, text or other object that is left.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(item, convert) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, convert) for item in value]
    return value if convert is None else convert(value)


def _number_or_text(value: Any) -> bool | int | float | str | None:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else str(value)


def _finite_number_or_text(value: Any) -> Any:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else str(value)


def _is_figure(value: Any) -> bool:
    """True for a dict of numbers, which are lines of one figure."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(part, (int, float)) for part in value.values())
