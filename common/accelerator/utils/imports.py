"""Questions of scripts: is a library installed, and what can the hardware do?"""

import importlib.metadata
import importlib.util

import torch

from .environment import patch_environment


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """True if a library is installed, not only a folder of that name."""
    if importlib.util.find_spec(pkg_name) is None:
        return False
    try:
        importlib.metadata.metadata(metadata_name or pkg_name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_peft_available() -> bool:
    return _is_package_available("peft")


def is_tensorboard_available() -> bool:
    return _is_package_available("tensorboard") or _is_package_available("tensorboardX")


def is_wandb_available() -> bool:
    return _is_package_available("wandb")


def is_cuda_available() -> bool:
    """True if there is a GPU, asked of the driver without starting CUDA: a process may still be forked afterwards."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """True if the device computes in bfloat16, however slowly."""
    return torch.cuda.is_bf16_supported() if is_cuda_available() else True


def is_fp16_available() -> bool:
    return True
