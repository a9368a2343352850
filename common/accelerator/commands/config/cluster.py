"""The questions of `config`, asked until each answer fits."""

from typing import Any

from .config_args import ClusterConfig, ConfigError, read_setting

YES_OR_NO = {"yes": True, "no": False}


def get_cluster_input() -> ClusterConfig:
    """The configuration that the answers on stdin describe; raises ConfigError when stdin ends before the answers."""
    import torch

    has_gpus = torch.cuda.device_count() > 0
    config = ClusterConfig(distributed_type="NO")
    config.use_cpu = _ask("use_cpu", "Train on the CPU, yes or no?", "no" if has_gpus else "yes")
    config.num_machines = _ask("num_machines", "How many machines?", "1")
    if config.num_machines > 1:
        config.machine_rank = _ask("machine_rank", "Which of them is this one, counted from 0?", "0")
        config.main_process_ip = _ask("main_process_ip", "Address of machine 0?")
        config.main_process_port = _ask("main_process_port", "Port of machine 0 to meet at?")
        config.rdzv_backend = _ask("rdzv_backend", "Rendezvous, static or c10d?", "static")
    one_per_machine = str(config.num_machines)
    config.num_processes = _ask("num_processes", "How many processes, all machines together?", one_per_machine)
    if config.num_processes > 1:
        config.distributed_type = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
        config.debug = _ask("debug", "Compare the collectives of the processes? Slower: yes or no?", "no")
    if not config.use_cpu:
        config.gpu_ids = _ask("gpu_ids", "Which GPUs of this machine, as 0,1?", "all")
    config.mixed_precision = _ask("mixed_precision", "Mixed precision: no, fp16 or bf16?", "no")
    config.check()
    return config


def _ask(key: str, question: str, default: str | None = None) -> Any:
    prompt = f"{question} [{default}] " if default else f"{question} "
    while True:
        try:
            answer = input(prompt).strip() or default or ""
        except EOFError:
            message = "the answers ended before the questions; `config default` asks none"
            raise ConfigError(message) from None
        value: str | bool = answer
        if key in ("use_cpu", "debug") and answer in YES_OR_NO:
            value = YES_OR_NO[answer]
        try:
            return read_setting(key, value, name="the answer")
        except ConfigError as error:
            print(error)
