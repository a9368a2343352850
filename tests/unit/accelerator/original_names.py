"""The table of the original's names: what each public name of the installed `accelerate` is here.

    python -m tests.unit.accelerator.original_names        print the table
    python -m tests.unit.accelerator.original_names --write

Each module of the wheel is imported. Each public name in it, also one that it imports from the library's other modules,
gets one of three verdicts:

- **here**: it can be imported at the same path under `common.accelerator`, and what calls the one can call the other;
- **out of scope**: it can be imported, and raises NotImplementedError with its name when it is used;
- **not a user's**: the module has the name for itself: for the original's command line or its tests, for its inner
  workings, or because it needs what another module defines.

Everything else is missing, which a test does not let pass.
"""

import importlib
import inspect
import pkgutil
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.accelerator.out_of_scope import OutOfScope

ORIGINAL = "accelerate"
CORE = "common.accelerator"
TABLE = Path(__file__).parents[3] / "common" / "accelerator" / "NAMES.md"

HERE = "here"
STAND_IN = "out of scope"
NOT_A_USERS = "not a user's"
MISSING = "missing"

# Modules that serve the original's own command line and tests, and those of commands that this core does not have.
NOT_A_USERS_MODULES = {
    "accelerate.commands.config.config_utils": "asks the questions of `accelerate config`",
    "accelerate.commands.config.sagemaker": "asks the questions of `accelerate config` about SageMaker",
    "accelerate.commands.estimate": "is a command that estimates the memory of models of the Hugging Face Hub",
    "accelerate.commands.menu": "shows the questions of `accelerate config` as a menu",
    "accelerate.commands.merge": "is a command that merges the sharded weights of FSDP",
    "accelerate.commands.to_fsdp2": "is a command that converts configurations of FSDP to version 2",
    "accelerate.commands.tpu": "is a command for TPUs",
    "accelerate.test_utils": "serves the original's own tests",
    "accelerate.utils.rich": "colours tracebacks, and is only used with `ACCELERATE_ENABLE_RICH`",
}
# What these two import from elsewhere is meant for their users, all of it.
FACADES = ("accelerate", "accelerate.utils")
# From these modules scripts also import classes that others define. Functions they take from `utils`; and in further
# modules a name that is defined elsewhere is there in passing.
CLASSES_ALSO_FROM = ("accelerate.accelerator", "accelerate.data_loader", "accelerate.state", "accelerate.tracking")
# Names that serve the inside of a module of the original.
NOT_A_USERS_NAMES = {
    "accelerate.checkpointing": [
        "load_accelerator_state",
        "load_custom_state",
        "save_accelerator_state",
        "save_custom_state",
    ],
    "accelerate.commands.accelerate_cli": [
        "estimate_command_parser",
        "merge_command_parser",
        "to_fsdp2_command_parser",
        "tpu_command_parser",
    ],
    "accelerate.commands.config.cluster": ["DYNAMO_BACKENDS"],
    "accelerate.commands.config.config": [
        "cache_dir",
        "default_config_file",
        "default_yaml_config_file",
        "get_user_input",
    ],
    "accelerate.commands.config.config_args": ["BaseConfig"],
    "accelerate.commands.config.default": ["default_json_config_file"],
    "accelerate.commands.config.update": ["default_config_file"],
    "accelerate.commands.env": ["default_config_file", "version"],
    "accelerate.commands.launch": [
        "CustomHelpFormatter",
        "DYNAMO_BACKENDS",
        "clean_option",
        "default_config_file",
        "options_to_group",
    ],
    "accelerate.commands.test": ["execute_subprocess_async", "path_in_accelerate_package"],
    "accelerate.commands.utils": ["CustomArgumentGroup"],
    "accelerate.data_loader": ["DataLoaderAdapter", "additional_kwargs", "v"],
    "accelerate.launchers": ["test_launch"],
    "accelerate.optimizer": ["move_to_device", "patch_optimizer_step"],
    # state.py may not import utils, which imports it.
    "accelerate.state": [
        "DynamoBackend",
        "GradientAccumulationPlugin",
        "SageMakerDistributedType",
        "ThreadLocalSharedDict",
    ],
    "accelerate.utils.dataclasses": ["MODEL_CONFIGS_TO_MEGATRON_PARSERS", "TensorInformation"],
    "accelerate.utils.imports": ["USE_TORCH_XLA"],
    "accelerate.utils.operations": ["is_torch_xpu_tensor"],
    "accelerate.utils.other": ["TORCH_SAFE_GLOBALS"],
}


class Name(NamedTuple):
    """A public name of a module of the original."""

    module: str
    name: str
    value: Any


def modules() -> Iterator[types.ModuleType]:
    """The modules of the original that a script may import from."""
    package = importlib.import_module(ORIGINAL)
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{ORIGINAL}."):
        if not _within(found.name, NOT_A_USERS_MODULES):
            yield importlib.import_module(found.name)


def _within(module: str, parents: dict[str, str]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def public_names(module: types.ModuleType) -> Iterator[Name]:
    """The names that `module` defines or imports from the original's other modules, in alphabetical order."""
    for name, value in sorted(vars(module).items()):
        home = getattr(value, "__module__", None)
        foreign = isinstance(home, str) and not home.startswith(ORIGINAL)
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and not foreign:
            yield Name(module.__name__, name, value)


def verdict(original: Name) -> str:
    """What `original` is here."""
    if original.name in NOT_A_USERS_NAMES.get(original.module, ()) or _is_internal(original):
        return NOT_A_USERS
    try:
        ours = find_here(original)
    except (ImportError, AttributeError):
        return NOT_A_USERS if _is_imported_in_passing(original) else MISSING
    return STAND_IN if is_stand_in(ours) else HERE


def _is_imported_in_passing(original: Name) -> bool:
    """Whether a module has the name only because it needs it itself."""
    if original.module in FACADES or _home(original) == original.module:
        return False
    if original.module not in CLASSES_ALSO_FROM or not isinstance(original.value, type):
        return True
    return _is_stand_in_at_home(original)


def _home(original: Name) -> str:
    """The module that defines the name: a class or function says it; constants have a module of their own."""
    constants = importlib.import_module(f"{ORIGINAL}.utils.constants")
    if hasattr(constants, original.name):
        return constants.__name__
    return getattr(original.value, "__module__", None) or original.module


def _is_stand_in_at_home(original: Name) -> bool:
    at_home = original._replace(module=_home(original))
    try:
        return is_stand_in(find_here(at_home))
    except (ImportError, AttributeError):
        return False


def _is_internal(original: Name) -> bool:
    is_logger = original.name in ("logger", "get_logger") and original.module != "accelerate.logging"
    return is_logger or original.name in ("annotations", "TYPE_CHECKING", "description", "main")


def find_here(original: Name) -> Any:
    """The thing of that name at the same path in the core. Raises ImportError or AttributeError if it is not there."""
    module = importlib.import_module(CORE + original.module.removeprefix(ORIGINAL))
    return getattr(module, original.name)


def is_stand_in(value: Any) -> bool:
    if isinstance(value, type):
        return issubclass(value, OutOfScope)
    return getattr(value, "is_out_of_scope", False)


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


def table() -> str:
    """The table in Markdown: a section for each module, a line for each verdict."""
    version = importlib.import_module(ORIGINAL).__version__
    lines = [
        "# The original's names",
        "",
        f"This page lists every public name of Hugging Face's accelerate {version}, one module after the",
        "other, and says what it is in `common.accelerator`. A name is public if it does not begin with an",
        "underscore. The names of a module include those that it imports from the other modules of",
        "accelerate, so many names occur more than once.",
        "",
        "Each name has one of three verdicts:",
        "",
        "- *here*: The name can be imported from the same path under `common.accelerator`, and what calls the",
        "  original can call it too. The few exceptions stand in `OTHER_SIGNATURE` in the test that is named below.",
        "- *out of scope*: The name can be imported, so that the imports of a script work. It raises",
        "  NotImplementedError with its name when it is used.",
        "- *not a user's*: The module has the name for itself, so scripts do not import it from there. It serves",
        "  the original's command line, its tests or its inner workings, or another module defines it. In the last",
        "  case the section of that other module, if it has one, says whether the name is here.",
        "",
        "The page is generated by `python -m tests.unit.accelerator.original_names --write`. The test",
        "`tests/unit/accelerator/test_original_names.py` fails if the page is out of date or a name is missing.",
        "",
        "The following modules have no section and no counterpart here, because training scripts do not need them:",
        "",
    ]
    lines += [f"- `{module}` {reason}." for module, reason in NOT_A_USERS_MODULES.items()]
    for module in modules():
        lines += _section(module)
    return "\n".join(lines) + "\n"


def _section(module: types.ModuleType) -> list[str]:
    by_verdict: dict[str, list[str]] = {}
    for name in public_names(module):
        by_verdict.setdefault(verdict(name), []).append(f"`{name.name}`")
    if not by_verdict:
        return []
    lines = ["", f"## {module.__name__}", ""]
    for kind in (HERE, STAND_IN, NOT_A_USERS, MISSING):
        if kind in by_verdict:
            lines.append(f"- {kind}: {', '.join(by_verdict[kind])}")
    return lines


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--write"]:
        TABLE.write_text(table(), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
