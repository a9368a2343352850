"""Loggers that speak once however many processes run."""

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from .state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose calls take two more keywords.

    `main_process_only` (default True): only the main process logs. `in_order` (default False): every process logs,
    one after the other in rank order, whatever `main_process_only` says; all processes must make the call, since they
    wait for each other. Messages begin with the rank.

    Raises:
        RuntimeError: by any logging call made before `PartialState()` or `Accelerator()` exists: nobody could say which
            process is the main one.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """The message with the rank before it, and the keywords for the logger underneath."""
        msg, kwargs = super().process(msg, kwargs)
        # The caller's file and line belong into the record, not those of `log` below.
        kwargs.setdefault("stacklevel", 2)
        rank = PartialState().process_index
        return f"[RANK {rank}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on the processes that the two keywords name."""
        if not PartialState._shared_state:
            raise RuntimeError(
                "You must initialize the accelerate state before logging: create an Accelerator() or PartialState(), "
                "which know the rank"
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, logger_kwargs = self.process(msg, kwargs)
        if not in_order:
            if not main_process_only or PartialState().is_main_process:
                self.logger.log(level, msg, *args, **logger_kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self.logger.log(level, msg, *args, **logger_kwargs)
            state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019 - adapters live as long as their modules
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that the same arguments give only once."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger `name` for multi-process use; see MultiProcessAdapter for its two extra keywords.

    Args:
        log_level: set on the logger and on the root logger; by default the environment variable ACCELERATE_LOG_LEVEL,
            and without it nothing is set.

    Raises:
        ValueError: for an unknown level.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
