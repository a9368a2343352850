"""Environment variables: truth values, choices, and changing them for a while."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for TRUE_WORDS, 0 for FALSE_WORDS, in upper or lower case; with `to_bool` True, False. Raises ValueError."""
    word = value.lower()
    if word in TRUE_WORDS:
        return True if to_bool else 1
    if word in FALSE_WORDS:
        return False if to_bool else 0
    raise ValueError(f"invalid truth value {value!r}")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The environment variable `key` as a truth value; `default` where it is not set."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The environment variable `key`; `default` as text where it is not set."""
    return os.environ.get(key, str(default))


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables for the block, their names in upper case, and put back what was there before."""
    changes = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update(before)
