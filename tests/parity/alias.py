"""The core under the name of the original: with this alias, `import accelerate…` finds `common.accelerator…`.

It shows that programs written for Accelerate run on the core unchanged. They import names that the core does not have:
of DeepSpeed, of devices that are out of scope, of what serves the original itself. For each name that the original's
source defines and the core does not, the alias makes a stand-in of the same kind:

- a class can be named in `isinstance` and derived from, but creating an object raises NotImplementedError;
- a function whose name begins with `is_` or `has_` answers False, and any other raises NotImplementedError; but
  `is_torch_version` compares;
- a constant has its value.

What has no part in a training comes from the installed wheel: `accelerate.test_utils`, those of the original's commands
that are out of scope here, how libraries load a model (`init_empty_weights`), and the constants of `accelerate.utils`.

Installing the alias changes the process for good: the core's own modules answer for the missing names from then on.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ORIGINAL = "accelerate"
CORE = "common.accelerator"
FROM_THE_WHEEL = (
    "accelerate.big_modeling",
    "accelerate.commands.estimate",
    "accelerate.commands.menu",
    "accelerate.commands.merge",
    "accelerate.commands.to_fsdp2",
    "accelerate.commands.tpu",
    "accelerate.hooks",
    "accelerate.test_utils",
    "accelerate.utils.constants",
    "accelerate.utils.modeling",
    "accelerate.utils.offload",
)


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers the original's module names with the core's modules, and what these lack with stand-ins."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def find_spec(self, fullname: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        """The module that stands for `fullname`; None for other libraries' modules."""
        if any(_is_within(fullname, package) for package in FROM_THE_WHEEL):
            folder = self.wheel.joinpath(*fullname.split(".")[1:-1])
            return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)])
        if not _is_within(fullname, ORIGINAL):
            return None
        if not self._is_in_core(fullname) and self._source(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Put the core's module, if there is one, in place of the new and empty one. Stand-ins give what it lacks."""
        fullname = module.__name__
        if self._is_in_core(fullname):
            module = importlib.import_module(_name_in_core(fullname))
            sys.modules[fullname] = module
        source = self._source(fullname)
        if source is not None:
            module.__getattr__ = functools.partial(stand_in, fullname, source)

    @staticmethod
    def _is_in_core(fullname: str) -> bool:
        try:
            return importlib.util.find_spec(_name_in_core(fullname)) is not None
        except ModuleNotFoundError:  # The package that it would be in is not there either.
            return False

    def _source(self, fullname: str) -> Path | None:
        """The file of the original's module."""
        path = self.wheel.joinpath(*fullname.split(".")[1:])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
        return None


def _is_within(fullname: str, package: str) -> bool:
    return fullname == package or fullname.startswith(f"{package}.")


def _name_in_core(fullname: str) -> str:
    return CORE + fullname.removeprefix(ORIGINAL)


@functools.cache
def stand_in(module: str, source: Path, name: str) -> Any:
    """A stand-in for what the original's `module` defines as `name` in `source`, by its kind.

    Raises:
        AttributeError: if it defines no such thing.
    """
    if name == "is_torch_version":
        return is_torch_version
    for statement in _statements(ast.parse(source.read_text())):
        match statement:
            case ast.ClassDef(name=defined) if defined == name:
                return type(name, (OutOfScope,), {"__module__": module})
            case ast.FunctionDef(name=defined) if defined == name:
                return _function(name)
            case ast.Assign(targets=[ast.Name(id=defined)], value=value) if defined == name:
                return ast.literal_eval(value)
            case ast.ImportFrom(names=imported) if name in [alias.name for alias in imported]:
                package = module if source.name == "__init__.py" else module.rpartition(".")[0]
                home = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
                return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module, those within `if` and `try` too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)
        elif isinstance(node, ast.stmt):
            yield node


class OutOfScope:
    """The base of classes that exist in name only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is out of scope in {CORE}")


def _function(name: str) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> bool:
        if name.startswith(("is_", "has_")):
            return False
        raise NotImplementedError(f"{name} is out of scope in {CORE}")

    answer.__name__ = answer.__qualname__ = name
    return answer


def is_torch_version(operation: str, version: str) -> bool:
    """True if the installed torch compares with `version` as `operation`, such as ">=", says."""
    comparisons = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">=": "ge", ">": "gt"}
    compare = getattr(operator, comparisons[operation])
    return compare(torch.__version__, version)


def install() -> None:
    """From now on `import accelerate` finds the core. Must come before the first import of the original."""
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    if ORIGINAL in sys.modules:
        raise RuntimeError(f"{ORIGINAL} has been imported already")
    wheel = importlib.util.find_spec(ORIGINAL)
    finder = AliasFinder(Path(wheel.origin).parent)
    sys.meta_path.insert(0, finder)
