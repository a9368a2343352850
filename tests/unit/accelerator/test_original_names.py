"""What bears a name of the original's takes the calls that the original takes."""

import contextlib
import enum
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from common.accelerator import Accelerator
from common.accelerator.state import DistributedType
from tests.peers import import_or_skip

accelerate = import_or_skip("accelerate")

CORE = "common.accelerator"
# What these two import from the original's other modules is meant for scripts, all of it.
FACADES = ("accelerate", "accelerate.utils")
# Where a call that the original takes is not one that ours takes, and why.
OTHER_SIGNATURE = {
    "AcceleratorState": "the plugins that it takes there are out of scope",
    "ClusterConfig": "a file's settings have defaults here, and no place among the others",
    "FullyShardedDataParallelPlugin": "what its first version alone has is missing",
    "TorchDynamoPlugin": "regional compilation is out of scope",
    "DataLoaderDispatcher": "`prepare_data_loader` makes it, by keywords",
    "extract_model_from_parallel": "what is recursive there is for parts that are out of scope",
    "load_checkpoint_in_model": "maps of a model over devices are out of scope, and offloading",
    "load_state_dict": "maps of a model over devices are out of scope",
}


class Name(NamedTuple):
    """A public name of a module of the original."""

    module: str
    name: str
    value: Any


def names_of(module: ModuleType) -> Iterator[Name]:
    """The classes and functions that a module defines; of a facade also constants, and what it imports."""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        home = getattr(value, "__module__", None)
        if module.__name__ in FACADES:
            is_its_own = not isinstance(home, str) or home.startswith("accelerate")
        else:
            is_its_own = home == module.__name__
        if is_its_own:
            yield Name(module.__name__, name, value)


@pytest.fixture(scope="module")
def names() -> list[Name]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(names_of(accelerate))
        for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
            with contextlib.suppress(ModuleNotFoundError):  # a part that is not here
                importlib.import_module(in_core(module.name))
                found += names_of(importlib.import_module(module.name))
    return found


def in_core(module: str) -> str:
    return CORE + module.removeprefix("accelerate")


def counterpart(name: Name) -> Any:
    """What has that name at the same path here; None if there is no such thing."""
    return vars(importlib.import_module(in_core(name.module))).get(name.name)


def test_calls_that_the_original_takes_are_taken_here(names):
    wrong = {}
    for name in names:
        ours = counterpart(name)
        if ours is not None and not isinstance(name.value, enum.EnumType):
            reason = incompatible(name.value, ours)
            if reason:
                wrong[name.name] = reason
    assert sorted(wrong) == sorted(OTHER_SIGNATURE), wrong


def test_the_accelerator_has_accelerates_methods_and_properties():
    left_out = {
        "context_parallel_rank",
        "data_parallel_rank",
        "data_parallel_shard_rank",
        "deepspeed_ulysses_dl_adapter",
        "dispatch_batches",
        "fp8_backend",
        "clear",
        "is_composable_parallelism_enabled",
        "lomo_backward",
        "maybe_context_parallel",
        "multi_device",
        "non_blocking",
        "on_local_process",
        "pipeline_parallel_rank",
        "save_iteration",
        "should_save_model",
        "tensor_parallel_rank",
        "split_batches",
        "torch_device_mesh",
        "unscale_gradients",
        "use_seedable_sampler",
        "use_stateful_dataloader",
        "verify_device_map",
    }
    public = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert public - set(dir(Accelerator)) == left_out


def test_the_distributed_types_are_accelerates():
    theirs = accelerate.DistributedType
    assert {kind.name: kind.value for kind in theirs} == {kind.name: kind.value for kind in DistributedType}
    assert {str(kind) for kind in theirs} == {str(kind) for kind in DistributedType}


def incompatible(theirs: Any, ours: Any) -> str | None:
    """Why a call that the original takes may not be one that ours takes; None if they agree."""
    if not callable(theirs) or isinstance(theirs, type(None)):
        return None
    if not callable(ours):
        return "is not callable here"
    try:
        expected = inspect.signature(theirs).parameters
        actual = inspect.signature(ours).parameters
    except ValueError:  # builtins, enumerations
        return None
    return _compare(list(expected.values()), actual)


def _compare(expected: list[inspect.Parameter], actual: Any) -> str | None:
    variadic = {parameter.kind for parameter in actual.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in variadic
    positions = list(actual)
    for position, parameter in enumerate(expected):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        here = actual.get(parameter.name)
        if here is None:
            if takes_any_name:
                continue
            return f"has no parameter {parameter.name!r}"
        optional = parameter.default is not parameter.empty
        if optional and here.default is here.empty:
            return f"demands {parameter.name!r}"
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and positions.index(parameter.name) != position:
            return f"has {parameter.name!r} at another place"
    names = {parameter.name for parameter in expected}
    for name, parameter in actual.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and name not in names and parameter.default is parameter.empty:
            return f"demands {name!r}, which the original does not have"
    return None
