"""Reading and changing environment variables."""

import os
from collections.abc import Iterator
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
    "get_cpu_distributed_information",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]


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
