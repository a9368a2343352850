"""Every public name of the original is here, or is said to be out of scope, or serves the original alone."""

import enum
import importlib
import importlib.util
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from common.accelerator import Accelerator
from common.accelerator.out_of_scope import TOPICS, topic_of
from common.accelerator.state import DistributedType

accelerate = pytest.importorskip("accelerate")

CORE = "common.accelerator"
# What these two import from the original's other modules is meant for scripts, all of it.
FACADES = ("accelerate", "accelerate.utils")
MODULES_NOT_HERE = {
    "accelerate.big_modeling": "models that are spread over devices",
    "accelerate.commands.config.config_utils": "asks the questions of `accelerate config`",
    "accelerate.commands.config.sagemaker": "asks the questions of `accelerate config` about SageMaker",
    "accelerate.commands.estimate": "a command that estimates the memory of models of the Hugging Face Hub",
    "accelerate.commands.menu": "shows the questions of `accelerate config` as a menu",
    "accelerate.commands.merge": "a command that merges the sharded weights of FSDP",
    "accelerate.commands.to_fsdp2": "a command that converts configurations of FSDP to version 2",
    "accelerate.commands.tpu": "a command for TPUs",
    "accelerate.hooks": "models that are spread over devices",
    "accelerate.inference": "pipeline parallelism",
    "accelerate.memory_utils": "only warns that its content has moved",
    "accelerate.parallelism_config": "tensor, context and sequence parallelism",
    "accelerate.test_utils": "serves the original's own tests",
    "accelerate.utils.ao": "fp8",
    "accelerate.utils.bnb": "weights in 4 and 8 bits",
    "accelerate.utils.deepspeed": "DeepSpeed",
    "accelerate.utils.fsdp_utils": "fully sharded data parallelism",
    "accelerate.utils.megatron_lm": "Megatron-LM",
    "accelerate.utils.offload": "models that lie on disk",
    "accelerate.utils.rich": "colours tracebacks",
    "accelerate.utils.torch_xla": "TPUs",
    "accelerate.utils.transformer_engine": "fp8",
}
# Names that serve the inside of the original: scripts have no use for them.
NOT_A_USERS = {
    "of its command line": [
        "BaseConfig",
        "CustomArgumentGroup",
        "CustomHelpFormatter",
        "PrepareForLaunch",
        "clean_option",
        "env_var_path_add",
        "get_user_input",
        "main",
        "prepare_extend_env_parallelism_config",
    ],
    "of its trackers": ["filter_trackers"],
    "of its checkpoints": [
        "load_accelerator_state",
        "load_custom_state",
        "save_accelerator_state",
        "save_custom_state",
    ],
    "of its loaders, optimizers and states": [
        "DataLoaderAdapter",
        "ThreadLocalSharedDict",
        "move_to_device",
        "patch_optimizer_step",
    ],
    "questions about the machine": [
        "are_libraries_initialized",
        "check_cuda_p2p_ib_support",
        "get_current_device_type",
        "get_driver_version",
        "get_gpu_info",
    ],
    "helpers": [
        "TensorInformation",
        "chained_operation",
        "check_device_same",
        "compute_module_total_buffer_size",
        "convert_bytes",
        "fallback_allocate",
        "gather_tensor_shape",
        "get_grad_scaler",
        "get_mixed_precision_context_manager",
        "get_module_children_bottom_up",
        "get_module_class_from_name",
        "get_module_leaves",
        "get_module_size_with_ties",
        "get_non_persistent_buffers",
        "get_pretty_name",
        "has_repeated_blocks",
        "is_repeated_blocks",
        "is_torch_xpu_tensor",
        "merge_dicts",
        "pad_input_tensors",
        "parse_bert_config",
        "parse_glm4_moe_config",
        "parse_gpt2_config",
        "parse_llama_config",
        "parse_t5_config",
        "recursive_getattr",
        "test_launch",
    ],
    "constants": [
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION",
        "TORCH_DISTRIBUTED_OPERATION_TYPES",
        "TORCH_LAUNCH_PARAMS",
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ],
}
# Where a call that the original takes is not one that ours takes, and why.
OTHER_SIGNATURE = {
    "ClusterConfig": "a file's settings have defaults here, and no place among the others",
    "DataLoaderDispatcher": "`prepare_data_loader` makes it, by keywords",
}


class Name(NamedTuple):
    """A public name of a module of the original."""

    module: str
    name: str
    value: Any


def is_within(module: str, packages: dict[str, str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


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
            if not is_within(module.name, MODULES_NOT_HERE):
                found += names_of(importlib.import_module(module.name))
    return found


def counterpart(name: Name) -> Any:
    """What has that name at the same path here; None if there is no such thing."""
    module = importlib.import_module(CORE + name.module.removeprefix("accelerate"))
    return vars(module).get(name.name)


def test_each_name_is_here_or_out_of_scope_or_not_a_users(names):
    not_a_users = {name for listed in NOT_A_USERS.values() for name in listed}
    lacking = [name for name in names if counterpart(name) is None]
    unexplained = [name for name in lacking if topic_of(name.name) is None and name.name not in not_a_users]
    assert [f"{name.module}.{name.name}" for name in unexplained] == []
    assert not_a_users <= {name.name for name in lacking}


def test_the_modules_that_are_not_here_are_not_here():
    for module in MODULES_NOT_HERE:
        assert importlib.util.find_spec(CORE + module.removeprefix("accelerate")) is None


@pytest.mark.parametrize("module, name", [("", "init_empty_weights"), (".utils", "FullyShardedDataParallelPlugin")])
def test_importing_what_is_out_of_scope_is_an_error_of_one_line(module, name):
    with pytest.raises(ImportError, match=rf"^{name} is out of scope here \(.*$"):
        exec(f"from {CORE}{module} import {name}")


def test_each_topic_is_said_to_somebody(names):
    out_of_scope = [name for name in names if name.module in FACADES and counterpart(name) is None]
    topics = {topic_of(name.name) for name in out_of_scope} | {topic_of("AimTracker"), topic_of("SageMakerConfig")}
    assert set(TOPICS) <= topics
    for name in out_of_scope:
        if topic_of(name.name) is not None:
            with pytest.raises(ImportError, match=name.name):
                getattr(importlib.import_module(CORE + name.module.removeprefix("accelerate")), name.name)


def test_a_name_that_nobody_has_is_an_ordinary_error():
    utils = importlib.import_module(f"{CORE}.utils")
    assert not hasattr(utils, "nonsense")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from {CORE}.utils import nonsense")


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
        "fp8_backend",
        "lomo_backward",
        "pipeline_parallel_rank",
        "tensor_parallel_rank",
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
