"""Reading and changing environment variables, and asking about GPUs without touching them."""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..environment import (
    CPUInformation,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    str_to_bool,
)

__all__ = [
    "CPUInformation",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "str_to_bool",
]

logger = logging.getLogger(__name__)

ACCELERATE_PREFIX = "ACCELERATE_"
FORBIDDEN_CHARACTERS = (";", "\n", "<", ">", " ")


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables for the block, their names in upper case, and put back what was there before."""
    before = dict(os.environ)
    names = [key.upper() for key in kwargs]
    for name, value in zip(names, kwargs.values(), strict=True):
        os.environ[name] = str(value)
    try:
        yield
    finally:
        for name in names:
            _restore_variable(name, before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """No variable is set in the block; afterwards those that were there before are, and no others."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _restore_variable(name: str, before: dict[str, str]) -> None:
    if name in before:
        os.environ[name] = before[name]
    else:
        os.environ.pop(name, None)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the test methods of a class and its subclasses, to leave ACCELERATE_* as they were.

    TrainingArguments set such variables (ACCELERATE_MIXED_PRECISION), which would reach the next test.
    """
    if isinstance(func_or_cls, type):
        _purge_test_methods(func_or_cls)
        setattr(func_or_cls, "__init_subclass__", classmethod(_purge_subclass))  # noqa: B010 - a method, for mypy
        return func_or_cls
    return _purged(func_or_cls)


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = dict(os.environ)
        try:
            return function(*args, **kwargs)
        finally:
            names = [name for name in {*os.environ, *before} if name.startswith(ACCELERATE_PREFIX)]
            for name in names:
                _restore_variable(name, before)

    vars(run)["_accelerate_is_purged_environment_wrapped"] = True
    return run


def _purge_test_methods(cls: type) -> None:
    for name in dir(cls):
        method = getattr(cls, name)
        already = hasattr(method, "_accelerate_is_purged_environment_wrapped")
        if name.startswith("test") and callable(method) and not already:
            setattr(cls, name, _purged(method))


def _purge_subclass(cls: type, **kwargs: Any) -> None:
    _purge_test_methods(cls)


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """`current_env` as lines NAME=value; a pair with an empty side or a character a shell would read is left out."""
    lines = []
    for key, value in current_env.items():
        forbidden = [character for character in FORBIDDEN_CHARACTERS if character in key + value]
        if key and value and not forbidden:
            lines.append(f"{key}={value}\n")
        else:
            logger.warning(f"Skipping {key}={value} as it contains forbidden characters or missing values.")
    return lines
