"""Reading and changing environment variables, and asking about GPUs without touching them."""

import functools
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..environment import (
    CPUInformation,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    str_to_bool,
)

__all__ = [
    "CPUInformation",
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "check_cuda_p2p_ib_support",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_cpu_distributed_information",
    "get_current_device_type",
    "get_driver_version",
    "get_gpu_info",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]

logger = logging.getLogger(__name__)

ACCELERATE_PREFIX = "ACCELERATE_"
FORBIDDEN_CHARACTERS = (";", "\n", "<", ">", " ")
# Several of these GPUs cannot talk to each other directly with a driver older than this one.
GPUS_WITHOUT_P2P = "RTX 40"
FIRST_GOOD_DRIVER = (550, 40, 7)
FIRST_CAPABILITY_WITH_FP8 = (8, 9)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables for the block, their names in upper case, and put back what was there before."""
    before = dict(os.environ)
    names = [key.upper() for key in kwargs]
    for name, value in zip(names, kwargs.values(), strict=True):
        os.environ[name] = str(value)
    try:
        yield
    finally:
        for name in names:
            _restore_variable(name, before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """No variable is set in the block; afterwards those that were there before are, and no others."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _restore_variable(name: str, before: dict[str, str]) -> None:
    if name in before:
        os.environ[name] = before[name]
    else:
        os.environ.pop(name, None)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the test methods of a class and its subclasses, to leave ACCELERATE_* as they were.

    TrainingArguments set such variables (ACCELERATE_MIXED_PRECISION), which would reach the next test.
    """
    if isinstance(func_or_cls, type):
        _purge_test_methods(func_or_cls)
        setattr(func_or_cls, "__init_subclass__", classmethod(_purge_subclass))  # noqa: B010 - a method, for mypy
        return func_or_cls
    return _purged(func_or_cls)


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = dict(os.environ)
        try:
            return function(*args, **kwargs)
        finally:
            names = [name for name in {*os.environ, *before} if name.startswith(ACCELERATE_PREFIX)]
            for name in names:
                _restore_variable(name, before)

    vars(run)["_accelerate_is_purged_environment_wrapped"] = True
    return run


def _purge_test_methods(cls: type) -> None:
    for name in dir(cls):
        method = getattr(cls, name)
        already = hasattr(method, "_accelerate_is_purged_environment_wrapped")
        if name.startswith("test") and callable(method) and not already:
            setattr(cls, name, _purged(method))


def _purge_subclass(cls: type, **kwargs: Any) -> None:
    _purge_test_methods(cls)


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """`current_env` as lines NAME=value; a pair with an empty side or a character a shell would read is left out."""
    lines = []
    for key, value in current_env.items():
        forbidden = [character for character in FORBIDDEN_CHARACTERS if character in key + value]
        if key and value and not forbidden:
            lines.append(f"{key}={value}\n")
        else:
            logger.warning(f"Skipping {key}={value} as it contains forbidden characters or missing values.")
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of `library_names` that have been imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """The kind of device, and of a distributed run on it, that launchers assume: here always NVIDIA GPUs."""
    return "cuda", "MULTI_GPU"


def _ask_nvidia_smi(what: str) -> list[str]:
    """A line for each GPU, without touching CUDA, which no forked process could use afterwards.

    Raises:
        OSError, subprocess.CalledProcessError: where there is no NVIDIA driver.
    """
    command = "nvidia-smi"
    if platform.system() == "Windows" and shutil.which(command) is None:
        command = f"{os.environ['SYSTEMDRIVE']}\\Program Files\\NVIDIA Corporation\\NVSMI\\nvidia-smi.exe"
    answer = subprocess.check_output([command, f"--query-gpu={what}", "--format=csv,noheader"], text=True)
    return answer.strip().splitlines()


def get_gpu_info() -> tuple[list[str], int]:
    """Names and number of the GPUs, asked of `nvidia-smi`; raises OSError where there is none."""
    lines = _ask_nvidia_smi("count,name")
    names = [line.split(",")[1].strip() for line in lines]
    return names, len(lines)


def get_driver_version() -> str:
    """The version of the NVIDIA driver, asked of `nvidia-smi`; raises OSError where there is none."""
    return _ask_nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs of this machine can talk to each other directly; True where nobody can tell."""
    try:
        names, count = get_gpu_info()
        concerned = count > 1 and any(GPUS_WITHOUT_P2P in name for name in names)
        return not concerned or _as_numbers(get_driver_version()) >= FIRST_GOOD_DRIVER
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return True


@functools.lru_cache
def check_cuda_fp8_capability() -> bool:
    """Whether the first GPU computes in fp8."""
    try:
        capability = _as_numbers(_ask_nvidia_smi("compute_cap")[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        capability = torch.cuda.get_device_capability()
    return capability >= FIRST_CAPABILITY_WITH_FP8


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the CPU cores near its GPU. Without a GPU there is nothing to do.

    Raises:
        NotImplementedError: on a machine with GPUs; `numactl` or torchrun's `--numa-binding` do it there.
    """
    if torch.cuda.is_available():
        raise NotImplementedError("CPU affinity is out of scope: start with numactl, or with torchrun --numa-binding")


@functools.lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """`override_numa_affinity`, once."""
    override_numa_affinity(local_process_index, verbose)
