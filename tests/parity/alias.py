"""The core under the name of the original: after `install()`, `import accelerate…` finds `common.accelerator…`.

So programs that were written for Accelerate run on the core unchanged. They also import what the core does not have:

- A module that the core lacks, such as `accelerate.hooks`, is loaded from the original's folder. What it imports of
  `accelerate` is the core's.
- A name that a module of the core lacks, such as `accelerate.utils.DeepSpeedPlugin`, is that of the original, which is
  loaded as `original_accelerate`.

What the core has never comes from the original, and `assert_original_is_idle` shows that what does has no part in a
training. The alias stays until the process ends.
"""

import functools
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Any

import common.accelerator

CORE = "common.accelerator"
ALIAS = "accelerate"
ORIGINAL = "original_accelerate"


def install() -> None:
    """From now on `import accelerate` finds the core. Must come before the first import of the original."""
    if ORIGINAL in sys.modules:
        return
    if ALIAS in sys.modules:
        raise RuntimeError(f"{ALIAS} has been imported already")
    folder = Path(importlib.util.find_spec(ALIAS).origin).parent
    names = [info.name for info in pkgutil.walk_packages(common.accelerator.__path__, f"{CORE}.")]
    names.remove(f"{CORE}.__main__")
    for name in (CORE, *names):
        module = importlib.import_module(name)
        place = name.removeprefix(CORE)  # such as ".utils.random"
        sys.modules[ALIAS + place] = module
        if hasattr(module, "__path__"):  # A package, which also finds modules in the original's folder from now on.
            module.__path__.append(str(folder.joinpath(*place.split("."))))
        module.__getattr__ = functools.partial(name_of_original, ORIGINAL + place)
    spec = importlib.util.spec_from_file_location(ORIGINAL, folder / "__init__.py")
    original = importlib.util.module_from_spec(spec)
    sys.modules[ORIGINAL] = original
    spec.loader.exec_module(original)


def name_of_original(module: str, name: str) -> Any:
    """What the original's `module` defines as `name`; an AttributeError if it does not, or is not there."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        raise AttributeError(f"module {module!r} has no attribute {name!r}") from None


def assert_original_is_idle() -> None:
    """Nothing of the original has asked which rank it runs on, so it had no part in a training."""
    assert sys.modules[f"{ORIGINAL}.state"].PartialState._shared_state == {}
