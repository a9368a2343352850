"""The questions of `config`, asked until each answer fits."""

from collections.abc import Callable
from typing import Any

from ...environment import str_to_bool
from ...state import PRECISIONS
from .config_args import RENDEZVOUS, ClusterConfig, ConfigError


def get_cluster_input() -> ClusterConfig:
    """The configuration that the answers on stdin describe; raises ConfigError when stdin ends before the answers."""
    import torch

    has_gpus = torch.cuda.device_count() > 0
    config = ClusterConfig(distributed_type="NO")
    config.use_cpu = _ask("Train on the CPU, yes or no?", _read_flag, "no" if has_gpus else "yes")
    config.num_machines = _ask("How many machines?", int, "1")
    if config.num_machines > 1:
        config.machine_rank = _ask("Which of them is this one, counted from 0?", int, "0")
        config.main_process_ip = _ask("Address of machine 0?", str)
        config.main_process_port = _ask("Port of machine 0 to meet at?", int)
        config.rdzv_backend = _ask("Rendezvous, static or c10d?", _one_of(RENDEZVOUS), "static")
    one_per_machine = str(config.num_machines)
    config.num_processes = _ask("How many processes, all machines together?", int, one_per_machine)
    if config.num_processes > 1:
        config.distributed_type = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
    if not config.use_cpu:
        config.gpu_ids = _ask("Which GPUs of this machine, as 0,1?", str, "all")
    config.mixed_precision = _ask("Mixed precision: no, fp16 or bf16?", _one_of(PRECISIONS), "no")
    config.check()
    return config


def _ask(question: str, read: Callable[[str], Any], default: str = "") -> Any:
    prompt = f"{question} [{default}] " if default else f"{question} "
    while True:
        try:
            answer = input(prompt).strip() or default
        except EOFError:
            raise ConfigError("the answers ended before the questions; `config default` asks none") from None
        try:
            return read(answer)
        except ValueError as error:
            print(error)


def _read_flag(answer: str) -> bool:
    return str_to_bool(answer) == 1


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(answer: str) -> str:
        if answer not in choices:
            raise ValueError(f"{answer!r} is none of {', '.join(choices)}")
        return answer

    return read
