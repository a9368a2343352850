"""The questions of `config`, each asked until its answer can be read; `ClusterConfig.check` looks at them all."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from common.flag_types import positive

from ...environment import str_to_bool
from ...state import choose_precision
from .config_args import ClusterConfig, ConfigError


def get_cluster_input() -> ClusterConfig:
    """The configuration that the answers on stdin describe; raises ConfigError when stdin ends before the answers.

    It is for one machine. What several need, `launch` takes as flags.
    """
    import torch

    read_flag = functools.partial(str_to_bool, to_bool=True)
    has_gpus = torch.cuda.device_count() > 0
    config = ClusterConfig(distributed_type="NO")
    config.use_cpu = _ask("Train on the CPU, yes or no?", read_flag, "no" if has_gpus else "yes")
    config.num_processes = _ask("How many processes?", positive, "1")
    if config.num_processes > 1:
        config.distributed_type = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
    config.mixed_precision = _ask("Mixed precision: no, fp16 or bf16?", choose_precision, "no")
    config.check()
    return config


def _ask(question: str, read: Callable[[str], Any], default: str) -> Any:
    while True:
        try:
            answer = input(f"{question} [{default}] ").strip() or default
        except EOFError:
            raise ConfigError("the answers ended before the questions; `config default` asks none") from None
        try:
            return read(answer)
        except (ValueError, NotImplementedError, argparse.ArgumentTypeError) as error:
            print(error)
