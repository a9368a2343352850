"""The libraries that tests compare with."""

import importlib
import re
from types import ModuleType

import pytest

from common import ladder

# The oldest releases that tests compare with, by library: as "peers" pins them in pyproject.toml.
VERSIONS = dict(re.findall(r'"(accelerate|transformers)==([\d.]+)\.\*"', (ladder.ROOT / "pyproject.toml").read_text()))


def import_or_skip(module: str) -> ModuleType:
    """A module of a peer, such as "accelerate.utils". Skips the test if the library is missing or older."""
    library = module.partition(".")[0]
    pytest.importorskip(library, minversion=VERSIONS[library])
    return importlib.import_module(module)
