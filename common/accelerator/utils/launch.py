"""From the settings of a launch to commands, environment variables and torchrun's options."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from common.cores import available_cores

from ..commands.config.config_args import ConfigError
from ..state import DistributedType
from .other import is_port_in_use

# What an outer job may have left behind. A world of one has none of them.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PortInUse(ConfigError, ConnectionError):
    """Another process listens on the port where the machines are to meet."""


def launch_environment(args: argparse.Namespace) -> dict[str, str]:
    """The variables that carry the launch's settings into the script; what nobody asked for is not set."""
    on_cpu = getattr(args, "cpu", False) or getattr(args, "use_cpu", False)
    if getattr(args, "distributed_type", None) == DistributedType.MULTI_CPU:
        on_cpu = True
    gpu_ids = getattr(args, "gpu_ids", None)
    threads = getattr(args, "num_cpu_threads_per_process", None)
    asked_for = {
        "ACCELERATE_MIXED_PRECISION": getattr(args, "mixed_precision", None),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": getattr(args, "gradient_accumulation_steps", None),
        "ACCELERATE_USE_CPU": "true" if on_cpu else None,
        "ACCELERATE_DEBUG_MODE": "1" if getattr(args, "debug", False) else None,
        "CUDA_VISIBLE_DEVICES": None if gpu_ids == "all" else gpu_ids,
        "OMP_NUM_THREADS": threads,
        "ACCELERATE_CPU_THREADS": threads,  # torchrun sets the other one too, to 1
    }
    return {name: str(value) for name, value in asked_for.items() if value is not None}


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command that runs the script as one process, and its whole environment.

    Raises:
        ValueError: for `module` and `no_python` at once.
    """
    _check_kind_of_script(args)
    environment = {**os.environ, **launch_environment(args)}
    for name in RANKS:
        environment.pop(name, None)
    command = []
    if not args.no_python:
        command.append(sys.executable)
    if args.module:
        command.append("-m")
    return [*command, args.training_script, *args.training_script_args], environment


def _check_kind_of_script(args: argparse.Namespace) -> None:
    if args.module and args.no_python:
        raise ConfigError("--module and --no_python cannot be used together")


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The whole environment of torchrun, and in `args` the options for it: how many processes, where they meet.

    Without a port, or with port 0, the processes of one machine meet at a free one. So they do, with a warning, where
    the port is taken.

    Raises:
        ConnectionError: if the port of several machines is taken on machine 0.
        ValueError: for `module` and `no_python` at once.
    """
    _check_kind_of_script(args)
    per_machine = args.num_processes // args.num_machines
    args.nproc_per_node = str(per_machine)
    args.nnodes = str(args.num_machines)
    args.node_rank = int(args.machine_rank or 0)
    args.standalone = not _may_use_port(args)
    if not args.standalone:
        args.rdzv_endpoint = f"{args.main_process_ip or '127.0.0.1'}:{args.main_process_port}"
        if args.rdzv_backend == "c10d":
            # Say who serves the meeting point, which torch would guess from host names.
            serves = f"is_host={int(args.node_rank == 0)}"
            args.rdzv_conf = f"{serves},{args.rdzv_conf}" if args.rdzv_conf else serves
    environment = {**os.environ, **launch_environment(args)}
    # torchrun would give each process one thread; the cores that are there, shared out, are what one wants.
    cores = available_cores() // per_machine
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    # A machine that comes back after a loss could not join: torch 2.15 says only once where the ranks meet.
    several_machines = args.num_machines > 1
    environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(several_machines)))
    return environment


def _may_use_port(args: argparse.Namespace) -> bool:
    port = args.main_process_port
    if not port:
        return False
    serves = args.node_rank == 0
    if not serves or not is_port_in_use(port):
        return True
    if args.num_machines > 1:
        raise PortInUse(f"main_process_port {port} is in use on this machine: take another")
    warnings.warn(f"main_process_port {port} is already in use: the processes meet at a free one", stacklevel=3)
    return False


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Sequence[str] = ()
) -> argparse.Namespace:
    """The arguments of `parser`, with the values that `args` has for them."""
    chosen, _ = parser.parse_known_args(list(default_args))
    for name in vars(chosen):
        if hasattr(args, name):
            setattr(chosen, name, getattr(args, name))
    return chosen
