"""Experiment trackers behind one interface: JSON lines, TensorBoard, SwanLab, or an object of your own.

The Accelerator starts, feeds and finishes them on the main process only. A tracker's package is imported when its run
starts, never before.
"""

import functools
import importlib.util
import json
import math
import os
from pathlib import Path

from .state import PartialState


def on_main_process(function):
    """Make a tracker's method run on the main process only, if the tracker's `main_process_only` says so."""

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        if not getattr(self, "main_process_only", False) or PartialState().is_main_process:
            return function(self, *args, **kwargs)

    return wrapper


class GeneralTracker:
    """The interface of every tracker; derive from it, or give an object with the same methods.

    A subclass defines `name`, `requires_logging_directory` (is the folder the second argument of the constructor?) and
    `tracker`, the underlying run; NotImplementedError names what is missing. `main_process_only` says whether methods
    decorated with `on_main_process` run on rank 0 alone, wherever they are called.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        # A blank one answers `get_tracker` where no tracker runs: it takes every call and does nothing.
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} must define {', '.join(missing)}")

    def start(self) -> None:
        """Open the run. Called by `init_trackers`, when the process group exists."""

    def store_init_configuration(self, values: dict) -> None:
        """Keep the run's hyperparameters: names to bool, int, float, str or None."""

    def log(self, values: dict, step: int | None = None, **kwargs) -> None:
        """Log names to numbers or text at `step`."""

    def finish(self) -> None:
        """Close the run."""


class JSONLinesTracker(GeneralTracker):
    """One JSON object a line in `<logging_dir>/<run_name>.jsonl`: first {"config": …}, then {"step": …, name: value}.

    Lines are appended, so that a resumed run continues its file, and are on disk when `log` returns. NaN and infinities
    are the texts "nan", "inf" and "-inf", which JSON has no numbers for.
    """

    name, requires_logging_directory, tracker = "jsonl", True, None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.jsonl"

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.tracker = self.path.open("a", buffering=1, encoding="utf-8")

    def store_init_configuration(self, values: dict) -> None:
        self._write({"config": values})

    def log(self, values: dict, step: int | None = None, **kwargs) -> None:
        self._write({"step": step, **values, **kwargs})

    def finish(self) -> None:
        self.tracker.close()

    def _write(self, row: dict) -> None:
        self.tracker.write(json.dumps(plain(row, finite=True), allow_nan=False) + "\n")


class TensorBoardTracker(GeneralTracker):
    """Event files in `<logging_dir>/<run_name>`. Keyword arguments go to `SummaryWriter`, those of `log` to its
    `add_scalar`, `add_text` and `add_scalars`, chosen by the value's type."""

    name, requires_logging_directory, tracker = "tensorboard", True, None
    writer = property(lambda self: self.tracker)

    def __init__(self, run_name: str, logging_dir: str | os.PathLike, **kwargs) -> None:
        super().__init__()
        self.logging_dir, self.init_kwargs = os.path.join(logging_dir, run_name), kwargs

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.tracker = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: dict) -> None:
        hparams = {n: v if isinstance(v, bool | int | float) else str(v) for n, v in values.items()}
        self.tracker.add_hparams(hparams, metric_dict={}, run_name=".")
        self.tracker.flush()

    def log(self, values: dict, step: int | None = None, **kwargs) -> None:
        add = {str: self.tracker.add_text, dict: self.tracker.add_scalars}
        for name, value in plain(values).items():
            add.get(type(value), self.tracker.add_scalar)(name, value, global_step=step, **kwargs)
        self.tracker.flush()

    def finish(self) -> None:
        self.tracker.close()


class SwanLabTracker(GeneralTracker):
    """A SwanLab run in the project `run_name`. Keyword arguments go to `swanlab.init`, those of `log` to its `log`."""

    name, requires_logging_directory, tracker = "swanlab", False, None

    def __init__(self, run_name: str, **kwargs) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    def start(self) -> None:
        import swanlab

        self.tracker = swanlab.init(project=self.run_name, **self.init_kwargs)
        self._config = swanlab.config

    def store_init_configuration(self, values: dict) -> None:
        self._config.update(values, allow_val_change=True)

    def log(self, values: dict, step: int | None = None, **kwargs) -> None:
        self.tracker.log(plain(values), step=step, **kwargs)

    def finish(self) -> None:
        self.tracker.finish()


LOGGER_TYPE_TO_CLASS = {tracker.name: tracker for tracker in (JSONLinesTracker, TensorBoardTracker, SwanLabTracker)}


def plain(value, finite: bool = False):
    """Tensors and arrays as Python numbers and lists; with `finite`, NaN and infinities as text."""
    if isinstance(value, dict):
        return {name: plain(item, finite) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, finite) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), finite)
    return str(value) if finite and isinstance(value, float) and not math.isfinite(value) else value


def get_available_trackers() -> list[str]:
    """Names of the trackers whose packages are installed."""
    return [name for name in LOGGER_TYPE_TO_CLASS if name == "jsonl" or importlib.util.find_spec(name)]


def select_trackers(log_with, logging_dir: str | os.PathLike | None = None) -> list:
    """The trackers that `log_with` asks for, in order and without repeats: classes for names, objects as given.

    `log_with` is None, a name, "all" (whatever is installed and, without a `logging_dir`, needs none), an object with
    the tracker's methods, or a list of these. Raises ValueError for an unknown name or a missing `logging_dir`, and
    ImportError for a package that is not installed.
    """
    chosen = []
    for entry in [] if log_with is None else log_with if isinstance(log_with, list | tuple) else [log_with]:
        if entry == "all":
            classes = [LOGGER_TYPE_TO_CLASS[name] for name in get_available_trackers()]
            chosen += [each for each in classes if logging_dir is not None or not each.requires_logging_directory]
        else:
            chosen.append(_by_name(str(entry), logging_dir) if isinstance(entry, str) else entry)
    return list(dict.fromkeys(chosen))


def _by_name(name: str, logging_dir) -> type[GeneralTracker]:
    if name not in LOGGER_TYPE_TO_CLASS:
        known = ", ".join(LOGGER_TYPE_TO_CLASS)
        raise ValueError(f"unknown tracker {name!r}: choose all, {known}, or pass an object with the tracker's methods")
    if name not in get_available_trackers():
        raise ImportError(f"log_with={name!r} needs a package that is not installed: pip install {name}")
    if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and logging_dir is None:
        raise ValueError(f"log_with={name!r} writes files: give the Accelerator a project_dir or a logging_dir")
    return LOGGER_TYPE_TO_CLASS[name]
