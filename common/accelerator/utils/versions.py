"""Comparing versions of libraries."""

import importlib.metadata
import operator
from collections.abc import Callable
from typing import Any

from torch.torch_version import TorchVersion

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}

torch_version = importlib.metadata.version("torch")


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """True if a library's version compares with `requirement_version` as `operation` says.

    Args:
        library_or_version: the name of an installed library, or a version object of the library `packaging`.
        operation: one of > >= == != <= <
        requirement_version: as in "2.11.0"; numbers count as numbers, so "2.9" is less than "2.11".

    Raises:
        ValueError: for another operation.
        importlib.metadata.PackageNotFoundError: for a library that is not installed.
    """
    if operation not in COMPARISONS:
        raise ValueError(f"`operation` must be one of {list(COMPARISONS)}, received {operation}")
    if isinstance(library_or_version, str):
        version = importlib.metadata.version(library_or_version)
    else:
        version = str(library_or_version)
    compare = COMPARISONS[operation]
    # torch's class orders any version text; the library `packaging` would be one more dependency.
    return compare(TorchVersion(version), requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """`compare_versions` of the installed torch with `version`."""
    return compare_versions("torch", operation, version)
