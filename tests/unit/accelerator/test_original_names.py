"""Names of the original take the calls that they take there."""

import contextlib
import enum
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from common.accelerator import Accelerator
from common.accelerator.state import DistributedType
from tests.peers import import_or_skip

accelerate = import_or_skip("accelerate")

CORE = "common.accelerator"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
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


def public_names() -> list[Name]:
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


def test_calls_that_the_original_takes_are_taken_here():
    others = set()
    for name in public_names():
        module = importlib.import_module(in_core(name.module))
        ours = vars(module).get(name.name)
        if ours is not None and is_called(name.value) and not takes_the_calls_of(name.value, ours):
            others.add(name.name)
    assert sorted(others) == sorted(OTHER_SIGNATURE)


def is_called(value: Any) -> bool:
    """True for functions and classes. Scripts do not call enumerations, and errors have no signature."""
    is_no_class_to_call = isinstance(value, type) and issubclass(value, (enum.Enum, Exception))
    return callable(value) and not is_no_class_to_call


def takes_the_calls_of(theirs: Callable, ours: Callable) -> bool:
    """True if `ours` takes calls with all arguments by name, with those alone that are required, and by position."""
    parameters = [each for each in inspect.signature(theirs).parameters.values() if each.kind not in VARIADIC]
    # Each argument is the name of its parameter, so that it shows which parameter takes it.
    by_name = {each.name: each.name for each in parameters}
    required = {each.name: each.name for each in parameters if each.default is each.empty}
    signature = inspect.signature(ours)
    by_position = list(by_name)
    while by_position and by_position[-1] not in signature.parameters:
        by_position.pop()  # `**kwargs` takes it, by name only.
    try:
        signature.bind(**by_name)
        signature.bind(**required)
        taken = signature.bind(*by_position).arguments
    except TypeError:
        return False
    return all(taken.get(name, name) == name for name in by_position)


def test_the_accelerator_has_accelerates_methods_and_properties():
    left_out = {
        "context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "deepspeed_ulysses_dl_adapter",
        "fp8_backend", "is_composable_parallelism_enabled", "lomo_backward", "maybe_context_parallel",
        "pipeline_parallel_rank", "should_save_model", "tensor_parallel_rank", "verify_device_map",
    }  # fmt: skip
    public = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
    assert public - set(dir(Accelerator)) == left_out


def test_the_distributed_types_are_accelerates():
    theirs = accelerate.DistributedType
    assert {kind.name: kind.value for kind in theirs} == {kind.name: kind.value for kind in DistributedType}
    assert {str(kind) for kind in theirs} == {str(kind) for kind in DistributedType}
