"""Ask a few questions, or none, and write the launcher's configuration file."""

import os
import sys
from pathlib import Path

from .config_args import READERS, ClusterConfig, ConfigError, default_config_file, require


def add_arguments(parser) -> None:
    add = parser.add_argument
    add("how", nargs="?", choices=["default"], help="ask nothing: all GPUs of this machine, else the CPU")
    add("--config_file", help="where to write; by default where the launcher looks")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="for `config default`")


def run(args) -> int:
    path = Path(args.config_file or default_config_file())
    require(args.how or not args.mixed_precision, "--mixed_precision goes with `config default`; else it is asked")
    if not args.how:
        _write(get_cluster_input(), path)
    elif not write_basic_config(args.mixed_precision or "no", path):
        return 1
    print(f"configuration saved at {path}")
    return 0


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike | None = None) -> Path | bool:
    """Write a configuration for all GPUs of this machine, or for one process on the CPU, and return its path.

    A file that exists is left as it is, and False returned. Raises ConfigError for an unknown precision or a place
    that cannot be written.
    """
    import torch

    path = Path(save_location or default_config_file())
    if path.exists():
        print(f"{path} exists and is left as it is: remove it or choose another place", file=sys.stderr)
        return False
    gpus = torch.cuda.device_count()
    config = ClusterConfig("MULTI_GPU" if gpus > 1 else "NO", num_processes=max(1, gpus), use_cpu=gpus == 0)
    config.mixed_precision = READERS["mixed_precision"]("mixed_precision", mixed_precision.lower())
    _write(config, path)
    return path


def _write(config: ClusterConfig, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def get_cluster_input() -> ClusterConfig:
    """The configuration that the answers on stdin describe; raises ConfigError when stdin ends before the answers."""
    import torch

    config = ClusterConfig("NO")
    _ask(config, "use_cpu", "Train on the CPU, yes or no?", "no" if torch.cuda.device_count() else "yes")
    _ask(config, "num_machines", "How many machines?", "1")
    if config.num_machines > 1:
        _ask(config, "machine_rank", "Which of them is this one, counted from 0?", "0")
        _ask(config, "main_process_ip", "Address of machine 0?")
        _ask(config, "main_process_port", "Port of machine 0 to meet at?")
        _ask(config, "rdzv_backend", "Rendezvous, static or c10d?", "static")
    _ask(config, "num_processes", "How many processes, all machines together?", str(config.num_machines))
    if config.num_processes > 1:
        config.distributed_type = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
        _ask(config, "debug", "Check every collective? Slower, but no hangs: yes or no?", "no")
    if not config.use_cpu:
        _ask(config, "gpu_ids", "Which GPUs of this machine, as 0,1?", "all")
    _ask(config, "mixed_precision", "Mixed precision: no, fp16 or bf16?", "no")
    config.check()
    return config


def _ask(config: ClusterConfig, key: str, question: str, default: str | None = None) -> None:
    while True:
        try:
            answer = input(f"{question} {f'[{default}] ' if default else ''}").strip() or default
        except EOFError:
            raise ConfigError("the answers ended before the questions; `config default` asks none") from None
        try:
            flag = {"yes": True, "no": False} if key in ("use_cpu", "debug") else {}
            return setattr(config, key, READERS[key]("the answer", flag.get(answer, answer)))
        except ConfigError as error:
            print(error)
