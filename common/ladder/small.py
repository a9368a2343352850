"""A level on `common.small`: the level's script with other imports, and otherwise as it stands."""

from types import ModuleType

from common.ladder.scripts import script

# The beginning of a line of the script, and what stands there instead.
IMPORTS = {
    "02_ddp_raw": {
        "from torch.nn.parallel import DistributedDataParallel": (
            "from common.small.ddp import BucketedDDP as DistributedDataParallel"
        ),
    },
    "03_accelerate": {
        "from common.accelerator import": "from common.small.accelerator import",
        "from common.accelerator.utils import": "from common.small.accelerator import",
    },
}


def small_source(rung: str) -> str:
    """The script of a level as a text, with the imports of IMPORTS.

    Raises:
        ValueError: for a level that has no small counterpart.
    """
    if rung not in IMPORTS:
        raise ValueError(f"{rung} has no small counterpart: one of {', '.join(IMPORTS)}")
    text = script(rung).read_text()
    for whole, small in IMPORTS[rung].items():
        assert text.count(f"\n{whole}") == 1, whole
        text = text.replace(f"\n{whole}", f"\n{small}")
    return text


def load_small(rung: str) -> ModuleType:
    """The script of a level on `common.small`, as a module."""
    path = str(script(rung))
    module = ModuleType("small_" + rung)
    module.__file__ = path
    exec(compile(small_source(rung), path, "exec"), vars(module))
    return module
