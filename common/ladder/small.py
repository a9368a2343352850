"""A level on `common.small`: the level's script, in which some imported names are replaced by small counterparts."""

import importlib
from types import ModuleType

from common.ladder import load

_ACCELERATOR = "common.small.accelerator"
# For each level: a name that its script imports, and the module and the name of its replacement.
COUNTERPARTS = {
    "02_ddp_raw": {"DistributedDataParallel": ("common.small.ddp", "BucketedDDP")},
    "03_accelerate": {
        "Accelerator": (_ACCELERATOR, "Accelerator"),
        "DataLoaderConfiguration": (_ACCELERATOR, "DataLoaderConfiguration"),
        "InitProcessGroupKwargs": (_ACCELERATOR, "InitProcessGroupKwargs"),
        "set_seed": (_ACCELERATOR, "set_seed"),
    },
}


def load_small(level: str) -> ModuleType:
    """The script of a level of COUNTERPARTS on `common.small`, as a module."""
    script = load(level)
    for name, (module, counterpart) in COUNTERPARTS[level].items():
        assert hasattr(script, name), name
        setattr(script, name, getattr(importlib.import_module(module), counterpart))
    return script
