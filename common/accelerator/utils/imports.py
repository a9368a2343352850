"""Questions of scripts: is a library installed, and what can the hardware and this torch do?"""

import importlib.metadata
import importlib.util

import torch

from ..out_of_scope import refuse_names_out_of_scope
from .environment import parse_flag_from_env, patch_environment
from .versions import compare_versions, is_torch_version


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    """True if a library is installed, not only a folder of that name."""
    if importlib.util.find_spec(pkg_name) is None:
        return False
    try:
        importlib.metadata.metadata(metadata_name or pkg_name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# Libraries that scripts use beside the core.


def is_datasets_available() -> bool:
    return _is_package_available("datasets")


def is_import_timer_available() -> bool:
    return _is_package_available("import_timer")


def is_matplotlib_available() -> bool:
    return _is_package_available("matplotlib")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    return _is_package_available("numpy") and compare_versions("numpy", ">=", min_version)


def is_pandas_available() -> bool:
    return _is_package_available("pandas")


def is_peft_available() -> bool:
    return _is_package_available("peft")


def is_pynvml_available() -> bool:
    return _is_package_available("pynvml") or _is_package_available("pynvml", "nvidia-ml-py")


def is_pytest_available() -> bool:
    return _is_package_available("pytest")


def is_rich_available() -> bool:
    return _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_schedulefree_available() -> bool:
    return _is_package_available("schedulefree")


def is_timm_available() -> bool:
    return _is_package_available("timm")


def is_torchdata_available() -> bool:
    return _is_package_available("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    return is_torchdata_available() and compare_versions("torchdata", ">=", "0.8.0")


def is_torchvision_available() -> bool:
    return _is_package_available("torchvision")


def is_tqdm_available() -> bool:
    return _is_package_available("tqdm")


def is_transformers_available() -> bool:
    return _is_package_available("transformers")


def is_triton_available() -> bool:
    return _is_package_available("triton")


# Trackers.


def is_aim_available() -> bool:
    return _is_package_available("aim") and compare_versions("aim", "<", "4.0.0")


def is_clearml_available() -> bool:
    return _is_package_available("clearml")


def is_comet_ml_available() -> bool:
    return _is_package_available("comet_ml")


def is_dvclive_available() -> bool:
    return _is_package_available("dvclive")


def is_mlflow_available() -> bool:
    return _is_package_available("mlflow") or _is_package_available("mlflow", "mlflow-skinny")


def is_swanlab_available() -> bool:
    return _is_package_available("swanlab")


def is_tensorboard_available() -> bool:
    return _is_package_available("tensorboard") or _is_package_available("tensorboardX")


def is_trackio_available() -> bool:
    return _is_package_available("trackio")


def is_wandb_available() -> bool:
    return _is_package_available("wandb")


# What the hardware and this torch can do.


def is_cuda_available() -> bool:
    """True if there is a GPU, asked of the driver without starting CUDA: a process may still be forked afterwards."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """True if the device computes in bfloat16, however slowly."""
    return torch.cuda.is_bf16_supported() if is_cuda_available() else True


def is_fp16_available() -> bool:
    return True


def is_mps_available(min_version: str = "1.12") -> bool:
    new_enough = is_torch_version(">=", min_version)
    return new_enough and torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_rocm_available() -> bool:
    return torch.version.hip is not None and torch.cuda.is_available()


def is_torch_distributed_available() -> bool:
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """True if `torch.load(weights_only=True)` takes a list of allowed types: in every torch that this core runs on."""
    return True


__getattr__ = refuse_names_out_of_scope(__name__)
