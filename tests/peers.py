"""The libraries that tests compare with."""

import importlib
import tomllib
from types import ModuleType

import pytest

from common import ladder

_PROJECT = tomllib.loads((ladder.ROOT / "pyproject.toml").read_text())["project"]
# The oldest releases that tests compare with, by library: "accelerate==1.15.*" becomes "accelerate": "1.15".
VERSIONS = dict(pin.removesuffix(".*").split("==") for pin in _PROJECT["optional-dependencies"]["peers"])


def import_or_skip(module: str) -> ModuleType:
    """A module of a peer, such as "accelerate.utils". Skips the test if the library is missing or older."""
    library = module.partition(".")[0]
    pytest.importorskip(library, minversion=VERSIONS[library])
    return importlib.import_module(module)
