"""Questions of scripts: is a library installed, and what can the hardware do?"""

import importlib.metadata
import importlib.util
import operator
from typing import Any

import torch
from torch.torch_version import TorchVersion

from .environment import patch_environment

_COMPARISONS = {">": "gt", ">=": "ge", "==": "eq", "!=": "ne", "<=": "le", "<": "lt"}  # names in `operator`


def _is_installed(package: str) -> bool:
    """True if a library is installed; not for a folder of that name."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def is_tensorboard_available() -> bool:
    return _is_installed("tensorboard")


def is_wandb_available() -> bool:
    return _is_installed("wandb")


def is_peft_available() -> bool:
    return _is_installed("peft")


def is_deepspeed_available() -> bool:
    return _is_installed("deepspeed")


def is_npu_available(check_device: bool = False) -> bool:
    """False: the core knows no such device. Scripts ask beside `is_cuda_available`."""
    return False


def is_xpu_available(check_device: bool = False) -> bool:
    return False


def is_torch_version(operation: str, version: str) -> bool:
    return compare_versions("torch", operation, version)


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """The answer to, for example, `compare_versions("numpy", ">=", "2.0")`; in place of a name, a `Version` will do."""
    if operation not in _COMPARISONS:
        raise ValueError(f"`operation` must be one of {list(_COMPARISONS)}, received {operation}")
    if operation == "!=":  # a TorchVersion, which is a text, would compare the texts
        return not compare_versions(library_or_version, "==", requirement_version)
    version = library_or_version
    if isinstance(version, str):
        version = importlib.metadata.version(version)
    compare = getattr(operator, _COMPARISONS[operation])
    return compare(TorchVersion(str(version)), requirement_version)


def is_cuda_available() -> bool:
    """True if there is a GPU, asked of the driver without starting CUDA: a process may still be forked afterwards."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """True if the device computes in bfloat16, however slowly. `ignore_tpu` has no effect: there is no TPU here."""
    return torch.cuda.is_bf16_supported() if is_cuda_available() else True


def is_fp16_available() -> bool:
    return True
