"""Environment variables: truth values, numbers, and the rank of this process among the others."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

TRUE_WORDS = ("y", "yes", "t", "true", "on", "1")
FALSE_WORDS = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on and 1; 0 for n, no, f, false, off and 0; in upper or lower case.

    Args:
        to_bool: return True and False instead.

    Raises:
        ValueError: for any other text.
    """
    word = value.lower()
    if word in TRUE_WORDS:
        return True if to_bool else 1
    if word in FALSE_WORDS:
        return False if to_bool else 0
    raise ValueError(f"invalid truth value {value!r}")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The environment variable `key` as a truth value; `default` where it is not set."""
    text = os.environ.get(key)
    if text is None and isinstance(default, bool):
        return default
    return str_to_bool(str(default) if text is None else text) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The environment variable `key`; `default` as text where it is not set."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of the environment variables `env_keys` that holds a number from 0; `default` where none does."""
    for key in env_keys:
        number = int(os.environ.get(key, -1))
        if number >= 0:
            return number
    return default


@dataclass
class CPUInformation:
    """The place of a process: `rank` of `world_size` among all, `local_rank` of `local_world_size` on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """The place that torchrun, Intel MPI, OpenMPI or MVAPICH wrote into the environment, the first of them first."""
    return CPUInformation(
        rank=get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        world_size=get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        local_rank=get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0
        ),
        local_world_size=get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"], 1
        ),
    )
