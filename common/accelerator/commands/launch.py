"""Run a script in one or many processes: the configuration file and the flags become a torchrun command.

    launch [--config_file F.yaml] [--num_processes N] … script.py [its arguments]

Flags win over the file. Without `--config_file` the default file is read, if there is one. The script gets its own
settings (mixed precision, accumulation, CPU) through the original's variables ACCELERATE_*. A single process is started
by Python alone, without torchrun, unless it shall be restarted or uses FSDP.
"""

import argparse
import dataclasses
import os
import sys
from typing import NoReturn

from common.cores import available_cores
from common.flag_types import natural, positive
from common.launch import LAUNCHER_ACCUMULATION, LAUNCHER_PRECISION, LAUNCHER_THREADS

from ..environment import patch_environment
from ..state import PRECISIONS
from ..utils.dataclasses import FullyShardedDataParallelPlugin
from ..utils.other import is_port_in_use
from .config.config_args import (
    FSDP_SETTINGS,
    RENDEZVOUS,
    SETTINGS,
    ClusterConfig,
    ConfigError,
    load_config_from_file,
    require,
)
from .utils import CustomArgumentParser, command_parser

# What an outer job may have left behind. A world of one has none of them.
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launch_command_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `launch`; alone, or as one of `subparsers`."""
    parser = command_parser("launch", subparsers, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config_file", help="YAML that `config` wrote")
    parser.add_argument("--num_processes", type=int, help="of all machines together")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU whatever the file says")
    parser.add_argument("--multi_gpu", action="store_true", help="one GPU per process, or an error")
    parser.add_argument("--gpu_ids", help="devices of this machine to use, as 0,1")
    parser.add_argument("--num_cpu_threads_per_process", type=positive, help="by default the cores shared out")
    parser.add_argument("--mixed_precision", choices=PRECISIONS)
    parser.add_argument("--gradient_accumulation_steps", type=positive)
    parser.add_argument("--use_fsdp", action="store_true", help="share the model out to the processes")
    for name in FSDP_SETTINGS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--num_machines", type=int)
    parser.add_argument("--machine_rank", type=int, help="of this machine, from 0")
    parser.add_argument("--main_process_ip", help="address of machine 0")
    parser.add_argument("--main_process_port", type=int, help="where the machines meet; 0 is a free port")
    parser.add_argument("--same_network", action="store_true", help="needs no action: they meet at main_process_ip")
    parser.add_argument("--rdzv_backend", choices=RENDEZVOUS)
    parser.add_argument("--rdzv_conf", help="more about the rendezvous: key=value,key=value")
    parser.add_argument("--max_restarts", type=natural, help="how often to start all again after a failure")
    parser.add_argument("-m", "--module", action="store_true", help="a module's name, as for `python -m`")
    parser.add_argument("--no_python", action="store_true", help="the script is a program to execute as it is")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs="...")
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> NoReturn:
    """Replace this process by the script, or by the torchrun that starts it. Does not return.

    Raises:
        ConfigError: a ValueError, for settings with which nothing can be launched.
    """
    config = merge(load_config_from_file(args.config_file), args)
    config.num_processes = count_processes(config)
    check_devices(config)
    require(not (args.module and args.no_python), "--module and --no_python cannot be used together")
    is_there = args.module or args.no_python or os.path.exists(args.training_script)
    require(is_there, f"no such script: {args.training_script}")
    environment = os.environ | launch_environment(args, config)
    if config.num_processes == 1 and config.distributed_type != "FSDP" and not args.max_restarts:
        command = simple_command(args)
        for name in RANKS:
            environment.pop(name, None)
    else:
        command = torchrun_command(args, config)
        # torchrun would give each process one thread. Here the processes of a machine share its cores.
        cores = available_cores() // config.processes_per_machine
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        # With a shared store a machine that comes back could not join: torch 2.15 tells the address of it only once.
        several_machines = config.num_machines > 1
        environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(several_machines)))
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise ConfigError(f"cannot execute {command[0]}: {error.strerror}") from error


def merge(config: ClusterConfig, args: argparse.Namespace) -> ClusterConfig:
    """The settings of the file, replaced by those of the flags. `--cpu` removes the file's GPUs; FSDP stays."""
    require(not (args.cpu and args.multi_gpu), "--cpu and --multi_gpu exclude each other")
    require(not (args.use_fsdp and args.multi_gpu), "--use_fsdp and --multi_gpu exclude each other")
    given = {}
    for name, value in vars(args).items():
        absent = value is None or value is False
        if name in SETTINGS and not absent:
            given[name] = value
    config = dataclasses.replace(config, **given)
    for name in FSDP_SETTINGS:
        if getattr(args, name) is not None:
            config.fsdp_config[name] = getattr(args, name)
    if args.cpu:
        config.use_cpu = True
        config.gpu_ids = "all"
    overrules_file = args.cpu or (args.num_processes is not None and config.distributed_type == "NO")
    if args.use_fsdp:
        config.distributed_type = "FSDP"
    elif args.multi_gpu:
        config.distributed_type = "MULTI_GPU"
    elif overrules_file and config.distributed_type != "FSDP":
        config.distributed_type = None  # The devices decide the type.
    config.check()
    return config


def count_gpus(config: ClusterConfig) -> int:
    """The GPUs of this machine that the configuration lets the processes use."""
    import torch

    if config.gpu_ids == "all":
        return torch.cuda.device_count()
    with patch_environment(CUDA_VISIBLE_DEVICES=config.gpu_ids):
        return torch.cuda.device_count()


def count_processes(config: ClusterConfig) -> int:
    """`num_processes`, else one per GPU of every machine, else one per machine."""
    count = config.num_processes
    is_open = count == -1 or (count is None and config.distributed_type == "MULTI_CPU")
    require(not is_open, "the configuration leaves the number of processes open: pass --num_processes")
    if count is not None:
        return count
    if config.use_cpu or config.distributed_type == "NO":
        return config.num_machines
    return config.num_machines * max(1, count_gpus(config))


def check_devices(config: ClusterConfig) -> None:
    """Raise ConfigError if the configuration wants more GPUs than this machine has."""
    asks_for_gpus = config.distributed_type == "MULTI_GPU" or config.gpu_ids != "all"
    if not asks_for_gpus:
        return
    wanted = config.processes_per_machine
    present = count_gpus(config)
    chosen = "" if config.gpu_ids == "all" else f" among gpu_ids {config.gpu_ids}"
    require(
        wanted <= present,
        f"this launch needs {wanted} GPUs on this machine, which has {present}{chosen}: add --cpu to run on the CPU, "
        "or change --num_processes",
    )


def launch_environment(args: argparse.Namespace, config: ClusterConfig) -> dict[str, str]:
    """The environment variables that pass the settings to the script. A setting that is not given has no variable."""
    threads = args.num_cpu_threads_per_process
    uses_fsdp = config.distributed_type == "FSDP"
    asked_for = {
        LAUNCHER_PRECISION: config.mixed_precision,
        LAUNCHER_ACCUMULATION: args.gradient_accumulation_steps,
        "ACCELERATE_USE_CPU": "true" if config.on_cpu else None,
        "ACCELERATE_USE_FSDP": "true" if uses_fsdp else None,
        "CUDA_VISIBLE_DEVICES": None if config.gpu_ids == "all" else config.gpu_ids,
        "OMP_NUM_THREADS": threads,
        LAUNCHER_THREADS: threads,  # torchrun sets the other one too, to 1
    }
    for name, value in config.fsdp_config.items():
        asked_for[FSDP_SETTINGS[name]] = value
    variables = {name: str(value) for name, value in asked_for.items() if value is not None}
    if uses_fsdp:
        with patch_environment(**variables):
            try:
                FullyShardedDataParallelPlugin()
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(error) from error
    return variables


def simple_command(args: argparse.Namespace) -> list[str]:
    command = [] if args.no_python else [sys.executable]
    if args.module:
        command.append("-m")
    return [*command, args.training_script, *args.training_script_args]


def torchrun_command(args: argparse.Namespace, config: ClusterConfig) -> list[str]:
    """The command that runs the script in this machine's processes, on one GPU each or on the CPU.

    Without a port, or with port 0, the processes of one machine meet at a free one.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    command.append(f"--nproc-per-node={config.processes_per_machine}")
    rendezvous = args.rdzv_conf
    port = config.main_process_port
    if not port:
        command.append("--standalone")
    else:
        serves = config.machine_rank == 0
        is_taken = serves and is_port_in_use(port)
        require(not is_taken, f"main_process_port {port} is in use on this machine: take another")
        command.append(f"--nnodes={config.num_machines}")
        command.append(f"--node-rank={config.machine_rank}")
        command.append(f"--rdzv-backend={config.rdzv_backend}")
        command.append(f"--rdzv-endpoint={config.main_process_ip or '127.0.0.1'}:{port}")
        if config.rdzv_backend == "c10d":
            # Say which machine runs the rendezvous server. Otherwise torch guesses it from host names.
            is_host = f"is_host={int(serves)}"
            rendezvous = f"{is_host},{rendezvous}" if rendezvous else is_host
    if rendezvous is not None:
        command.append(f"--rdzv-conf={rendezvous}")
    if args.max_restarts is not None:
        command.append(f"--max-restarts={args.max_restarts}")
    if args.module:
        command.append("--module")
    if args.no_python:
        command.append("--no-python")
    # Without the dashes torchrun takes the script's flags for its own if they begin like these: `--log`, `--node`.
    return [*command, "--", args.training_script, *args.training_script_args]
