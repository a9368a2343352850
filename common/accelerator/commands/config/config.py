"""Ask a few questions, or none, and write the launcher's configuration file."""

import os
import sys
from pathlib import Path

from .config_args import READERS, ClusterConfig, ConfigError, default_config_file, require


def add_arguments(parser) -> None:
    add = parser.add_argument
    add("how", nargs="?", choices=["default"], help="the same as --default")
    add("--default", action="store_true", help="ask nothing: all GPUs of this machine, else one process on the CPU")
    add("--config_file", help="where to write; by default where the launcher looks")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="for --default")


def run(args) -> int:
    path = Path(args.config_file or default_config_file())
    without_questions = args.default or args.how
    require(without_questions or not args.mixed_precision, "--mixed_precision goes with --default; else it is asked")
    if not without_questions:
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
    config.mixed_precision = mixed_precision.lower()
    config.check()
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

    here = "gpu" if torch.cuda.device_count() else "cpu"
    config = ClusterConfig("NO", use_cpu=_ask("Train on cpu or gpu?", here, _one_of("cpu", "gpu")) == "cpu")
    config.num_machines = _ask("How many machines?", "1", _count)
    if config.num_machines > 1:
        config.machine_rank = _ask("Which of them is this one, counted from 0?", "0", READERS["machine_rank"])
        config.main_process_ip = _ask("Address of machine 0?", None, READERS["main_process_ip"])
        config.main_process_port = _ask("Port of machine 0 to meet at?", None, READERS["main_process_port"])
        config.rdzv_backend = _ask("Rendezvous, static or c10d?", "static", _one_of("static", "c10d"))
    config.num_processes = _ask("How many processes, all machines together?", str(config.num_machines), _count)
    if config.num_processes > 1:
        config.distributed_type = "MULTI_CPU" if config.use_cpu else "MULTI_GPU"
        config.debug = _ask("Check every collective? Slower, but no hangs.", "no", _one_of("yes", "no")) == "yes"
    if not config.use_cpu:
        config.gpu_ids = _ask("Which GPUs of this machine, as 0,1?", "all", READERS["gpu_ids"])
    config.mixed_precision = _ask("Mixed precision: no, fp16 or bf16?", "no", _one_of("no", "fp16", "bf16"))
    config.check()
    return config


def _ask(question: str, default: str | None, read):
    while True:
        try:
            answer = input(f"{question} {f'[{default}] ' if default else ''}").strip() or default
        except EOFError:
            raise ConfigError("the answers ended before the questions; `config --default` asks none") from None
        try:
            return read("the answer", answer)
        except ConfigError as error:
            print(error)


def _count(key: str, value) -> int:
    number = READERS["num_machines"](key, value)
    require(number >= 1, f"{key} must be at least 1")
    return number


def _one_of(*choices: str):
    def read(key: str, value) -> str:
        require(value in choices, f"{key} must be {' or '.join(choices)}")
        return value

    return read
