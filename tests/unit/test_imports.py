"""Imports run one way: levels and benchmarks → common.trainer → common.accelerator → torch.

In benchmarks/ what measures stands below what is measured, and that below what draws and prints: see ROOMS.

What is imported inside of a function counts too: it runs later, but the reader of one module still has to know the
other.
"""

import ast
import graphlib
import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from common import ladder
from tests.jobs import run_to_end

# Base modules: any room may stand on them.
BASE = {
    "common.cores",
    "common.errors",
    "common.eval_sampler",
    "common.files",
    "common.hidden_gpus",
    "common.launch",
    "common.levels",
    "common.nested",
    "common.flag_types",
    "common.process_group",
    "common.weights",
}
# What each room may import besides; those of benchmarks/ all of common/, too. A room is a folder or a module of common/
# or benchmarks/, or the levels.
ROOMS = {
    "levels": {
        "common.accelerator",
        "common.args",
        "common.checkpoints",
        "common.data",
        "common.instruments",
        "common.model",
        "common.small",
        "common.start",
        "common.trainer",
    },
    "common.accelerator": set(),
    "common.allocator": set(),
    "common.memory": set(),
    "common.processes": {"common.rank_process"},
    "common.rank_process": {"common.allocator"},
    "common.model": set(),
    "common.small": set(),
    "common.trainer": {"common.accelerator"},
    "common.args": {"common.checkpoints", "common.instruments"},
    "common.settings": {"common.args", "common.model"},
    "common.start": {"common.allocator", "common.settings"},
    "common.checkpoints": set(),
    "common.data": set(),
    "common.instruments": set(),
    # The exercises compare a solution with the small abstraction.
    "common.exercises": {"common.processes", "common.small"},
    "common.ladder": {"common.exercises", "common.processes", "common.small"},
    "common.pitfalls": {"common.accelerator", "common.processes"},
    # The doctor names the pitfalls that it finds.
    "common.doctor": {"common.pitfalls"},
    "benchmarks.harness": set(),
    "benchmarks.suites": {"benchmarks.harness"},
    "benchmarks.report": {"benchmarks.harness", "benchmarks.suites"},
    "benchmarks.your_network": {"benchmarks.harness"},
    "benchmarks.compare": {"benchmarks.harness", "benchmarks.suites", "benchmarks.report"},
    "benchmarks.__main__": {"benchmarks.harness", "benchmarks.suites", "benchmarks.report"},
    "benchmarks.test_levels": {"benchmarks.harness", "benchmarks.suites"},
}
# What the core needs besides torch and the standard library comes in where it is first used.
AT_FIRST_USE = {"numpy", "peft", "safetensors", "tensorboardX", "tqdm", "yaml"}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ladder.ROOT)}:{self.line} imports {self.imported}"


def module_files(pattern: str) -> dict[str, Path]:
    """The repository's modules by name; scripts of the levels are named by their paths."""
    found = {}
    for path in sorted(ladder.ROOT.glob(pattern)):
        name = ".".join(path.relative_to(ladder.ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


COMMON = module_files("common/**/*.py")
BENCHMARKS = module_files("benchmarks/**/*.py")
LEVELS = module_files("0?_*/**/*.py")
MODULES = COMMON | BENCHMARKS | LEVELS


def names_of(node: ast.Import | ast.ImportFrom, importer: str, is_package: bool) -> list[str]:
    """The modules that a statement imports; of `from package import name` the submodule where `name` is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = importer if is_package else importer.rpartition(".")[0]
    source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    submodules = [f"{source}.{alias.name}" for alias in node.names if f"{source}.{alias.name}" in MODULES]
    if len(submodules) == len(node.names):
        return submodules
    return [source, *submodules]


def imports_of(name: str, path: Path) -> list[Import]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for imported in names_of(node, name, path.name == "__init__.py"):
                found.append(Import(name, imported, path, node.lineno))
    return found


@cache
def imports() -> list[Import]:
    return [found for name, path in MODULES.items() for found in imports_of(name, path)]


def top(module: str) -> str:
    return module.partition(".")[0]


def room(module: str) -> str:
    """The room of a module of this project, `tests` for those of the tests, and of other modules the library."""
    if module in LEVELS:
        return "levels"
    return ".".join(module.split(".")[:2]) if top(module) in ("common", "benchmarks") else top(module)


def may_import(ours: str, theirs: str) -> bool:
    if ours in BASE or theirs in BASE:
        return theirs in BASE
    return theirs in ROOMS.get(ours, ()) or (top(ours) == "benchmarks" and top(theirs) == "common")


def test_there_is_no_cycle_of_imports():
    edges = defaultdict(set)
    for found in imports():
        if found.imported in MODULES and found.imported != found.importer:
            edges[found.importer].add(found.imported)
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError shows the way round


def test_rooms_import_what_stands_below_them_and_nothing_else():
    wrong = []
    unused = {(ours, theirs) for ours, allowed in ROOMS.items() for theirs in allowed}
    for found in imports():
        ours = room(found.importer)
        theirs = room(found.imported)
        is_of_this_project = top(theirs) in ("common", "benchmarks", "tests")
        if is_of_this_project and ours != theirs and not may_import(ours, theirs):
            wrong.append(str(found))
        unused.discard((ours, theirs))
    assert wrong == []
    assert unused == set()


def test_tests_of_the_core_import_nothing_of_benchmarks():
    tests = ladder.ROOT / "tests"
    paths = [tests / "conftest.py", *sorted((tests / "unit" / "accelerator").glob("*.py"))]
    found = [found for path in paths for found in imports_of(f"tests.unit.accelerator.{path.stem}", path)]
    assert found
    assert [str(each) for each in found if top(each.imported) == "benchmarks"] == []


def modules_below(importer: str, found_before: frozenset[str] = frozenset()) -> frozenset[str]:
    """The modules of this project that a script stands on, itself included."""
    modules = found_before | {importer}
    for found in imports():
        if found.importer == importer and found.imported in MODULES and found.imported not in modules:
            modules = modules_below(found.imported, modules)
    return modules


@pytest.mark.parametrize("level", ["00_single_gpu", "01_data_parallel", "02_ddp_raw"])
def test_levels_in_plain_torch_stand_on_little(level):
    modules = modules_below(f"{level}.train")
    assert "common.instruments.clock" in modules
    assert not {"common.accelerator", "common.trainer"} & {room(module) for module in modules}


def test_the_core_uses_few_libraries():
    known = {"common", "torch"} | AT_FIRST_USE | set(sys.stdlib_module_names)
    of_core = [found for found in imports() if room(found.importer) == "common.accelerator"]
    assert [str(found) for found in of_core if top(found.imported) not in known] == []


def test_the_core_imports_torch_and_the_standard_library_when_it_is_imported():
    code = "import torch, sys; before = set(sys.modules); import common.accelerator; print(*set(sys.modules) - before)"
    done = run_to_end([sys.executable, "-c", code])
    tops = set(map(top, done.stdout.split()))
    assert done.returncode == 0, done.stderr
    made_by_torch = {"torch", "_remote_module_non_scriptable"}
    assert tops - set(sys.stdlib_module_names) - made_by_torch == {"common"}
