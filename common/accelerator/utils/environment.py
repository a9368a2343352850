"""Reading and changing environment variables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..state import parse_flag_from_env, str_to_bool  # noqa: F401


@contextmanager
def patch_environment(**kwargs) -> Iterator[None]:
    """Set variables for the block, their names in upper case, and put back what was there before."""
    before = dict(os.environ)
    os.environ.update({key.upper(): str(value) for key, value in kwargs.items()})
    try:
        yield
    finally:
        for key in map(str.upper, kwargs):
            os.environ.pop(key, None)
            os.environ.update({key: before[key]} if key in before else {})
