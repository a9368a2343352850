"""The former place of `find_executable_batch_size`, from which scripts may still import it."""

from .utils.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
