"""The core under the name of the original: with this alias, `import accelerate…` finds `common.accelerator…`.

It shows that programs written for Accelerate run on the core unchanged. Only `accelerate.test_utils`, which is no part
of what a script uses, comes from the installed wheel.

    python -m tests.alias SCRIPT.py [ARGUMENTS]        run a script with the alias
    python -m tests.alias -m MODULE [ARGUMENTS]        run a module
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

ORIGINAL = "accelerate"
CORE = "common.accelerator"
FROM_THE_WHEEL = "accelerate.test_utils"


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers the original's module names with the core's modules."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        """The module of the core, or of the wheel, that stands for `fullname`; None for other libraries' modules."""
        if fullname == FROM_THE_WHEEL or fullname.startswith(f"{FROM_THE_WHEEL}."):
            folder = self.wheel.joinpath(*fullname.split(".")[1:-1])
            return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)])
        if fullname != ORIGINAL and not fullname.startswith(f"{ORIGINAL}."):
            return None
        if importlib.util.find_spec(self._name_in_core(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    @staticmethod
    def _name_in_core(fullname: str) -> str:
        return CORE + fullname.removeprefix(ORIGINAL)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The core's own module: it exists once, under two names."""
        module = importlib.import_module(self._name_in_core(spec.name))
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give back the module's own spec, which the import system has just replaced. There is nothing to run."""
        module.__spec__ = self._own_spec


def install() -> None:
    """From now on `import accelerate` finds the core. Must come before the first import of the original."""
    if ORIGINAL in sys.modules:
        raise RuntimeError(f"{ORIGINAL} has been imported already")
    wheel = importlib.util.find_spec(ORIGINAL)
    finder = AliasFinder(Path(wheel.origin).parent)
    sys.meta_path.insert(0, finder)


def main() -> None:
    """Run the script or the module of the command line with the alias."""
    install()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
