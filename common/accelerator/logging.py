"""Loggers that speak once however many processes run."""

import functools
import logging
import os

from .state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter):
    """A logger whose calls take two more keywords.

    `main_process_only` (default True): only the main process logs. `in_order` (default False): every process logs,
    one after the other in rank order, whatever `main_process_only` says; all processes must make the call, since they
    wait for each other. Messages begin with the rank.

    RuntimeError is raised by any logging call made before `PartialState()` or `Accelerator()` exists: nobody could say
    which process is the main one.
    """

    def process(self, msg, kwargs):
        msg, kwargs = super().process(msg, kwargs)
        # The caller's file and line belong into the record, not `log` below.
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level, msg, *args, **kwargs):
        if not PartialState._shared_state:
            raise RuntimeError("create an Accelerator() or PartialState() before logging: the logger needs the rank")
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)
        state = PartialState()
        if not in_order and (state.is_main_process or not main_process_only):
            self.logger.log(level, msg, *args, **kwargs)
        for rank in range(state.num_processes) if in_order else ():
            if rank == state.process_index:
                self.logger.log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019 - adapters live as long as their modules
    def warning_once(self, *args, **kwargs):
        """A warning that the same arguments give only once."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger `name` for multi-process use; see MultiProcessAdapter for its two extra keywords.

    `log_level`, or else the environment variable ACCELERATE_LOG_LEVEL, is set on the logger and on the root logger.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
