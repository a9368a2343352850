"""Run a script in one or many processes: the configuration file and the flags become a torchrun launch.

    launch [--config_file F.yaml] [--num_processes N] … script.py [its arguments]

Flags win over the file; without `--config_file` it is the default file, if there is one. What the script itself has to
know (mixed precision, accumulation, CPU, debug mode) travels in the ACCELERATE_* variables of the original. One process
on one machine is simply this interpreter running the script.
"""

import argparse
import dataclasses
import os
import signal
import sys
import warnings
from typing import Any

from ..utils.environment import patch_environment
from ..utils.launch import _filter_args, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from .config.config_args import (
    SETTINGS,
    ClusterConfig,
    ConfigError,
    load_config_from_file,
    read_setting,
    require,
)
from .utils import CustomArgumentParser, command_parser


def launch_command_parser(subparsers: argparse._SubParsersAction | None = None) -> CustomArgumentParser:
    """The parser of `launch`; alone, or as one of `subparsers`."""
    parser = command_parser("launch", subparsers, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config_file", help="YAML that `config` wrote")
    parser.add_argument("-q", "--quiet", action="store_true", help="no summary of the ranks that failed")
    _add_hardware_arguments(parser)
    _add_machine_arguments(parser)
    _add_torchrun_arguments(parser)
    parser.add_argument("-m", "--module", action="store_true", help="a module's name, as for `python -m`")
    parser.add_argument("--no_python", action="store_true", help="the script is a program to execute as it is")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs="...")
    parser.set_defaults(func=launch_and_explain)
    return parser


def _add_hardware_arguments(parser: CustomArgumentParser) -> None:
    parser.add_argument("--num_processes", type=int, help="of all machines together")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU whatever the file says")
    parser.add_argument("--multi_gpu", action="store_true", help="one GPU per process, or an error")
    parser.add_argument("--gpu_ids", help="devices of this machine to use, as 0,1")
    parser.add_argument("--num_cpu_threads_per_process", type=int, help="by default the cores shared out")
    parser.add_argument("--mixed_precision", help="no, fp16 or bf16")
    parser.add_argument("--gradient_accumulation_steps", type=int)
    parser.add_argument("--debug", action="store_true", help="compare collectives of the ranks (ACCELERATE_DEBUG_MODE)")


def _add_machine_arguments(parser: CustomArgumentParser) -> None:
    parser.add_argument("--num_machines", type=int)
    parser.add_argument("--machine_rank", type=int, help="of this machine, from 0")
    parser.add_argument("--main_process_ip", help="address of machine 0")
    parser.add_argument("--main_process_port", type=int, help="where the machines meet; 0 is a free port")
    parser.add_argument("--same_network", action="store_true", help="needs no action: they meet at main_process_ip")
    parser.add_argument("--rdzv_backend", help="static or c10d")


def _add_torchrun_arguments(parser: CustomArgumentParser) -> None:
    parser.add_argument("--rdzv_conf", default="", help="more about the rendezvous: key=value,key=value")
    parser.add_argument("--max_restarts", type=int, default=0, help="how often to start all again after a failure")
    parser.add_argument("--monitor_interval", type=float, default=0.1, help="seconds between looks at the processes")
    parser.add_argument("--log_dir", help="a folder for log files of the processes' output")
    parser.add_argument("-t", "--tee", default="0", help="output to log files too: 1 stdout, 2 stderr, 3 both")
    parser.add_argument("--role", default="default", help="the name of the processes in torchrun's messages")


def launch_and_explain(args: argparse.Namespace) -> int:
    """Launch, and show torchrun's summary of the ranks that failed.

    Returns:
        0; 1 after a failed process; 128 + n after signal n to the launcher. One process on one machine without
        restarts does not return: this process becomes the script.

    Raises:
        ConfigError: for a launch that cannot be.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_in_one_line
            launch_command(args)
    except ChildFailedError as job:
        if not args.quiet:
            print(job, file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"launch: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + error.sigval
    except (DistError, RendezvousError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the machines did not meet: {reason}") from error
    return 0


def _show_in_one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"launch: {message}", file=sys.stderr)


def launch_command(args: argparse.Namespace) -> None:
    """Run the script as `args`, of launch_command_parser, and the configuration file say. `args` holds both after this.

    Raises:
        ConfigError: a ValueError, for a launch that cannot be.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if a process fails.
    """
    file = load_config_from_file(args.config_file)
    config = merge(file, args)
    check_numbers(args)
    config.num_processes = count_processes(config)
    check_devices(config)
    check_script(args)
    vars(args).update(vars(config))
    if config.num_processes == 1 and args.max_restarts == 0:
        simple_launcher(args)
    else:
        multi_gpu_launcher(args)


def merge(config: ClusterConfig, args: argparse.Namespace) -> ClusterConfig:
    """The file's settings under the flags'. `--cpu` takes back all that the file says about GPUs."""
    require(not (args.cpu and args.multi_gpu), "--cpu and --multi_gpu exclude each other")
    given = {}
    for name, value in vars(args).items():
        absent = value is None or value is False
        if name in SETTINGS and not absent:
            given[name] = read_setting(name, value, name=f"--{name}")
    config = dataclasses.replace(config, **given)
    if args.cpu:
        config.distributed_type = None
        config.use_cpu = True
        config.gpu_ids = "all"
    elif args.multi_gpu:
        config.distributed_type = "MULTI_GPU"
    elif args.num_processes is not None and config.distributed_type == "NO":
        config.distributed_type = None
    config.check()
    return config


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ConfigError for a number that cannot be counted to."""
    least = {"gradient_accumulation_steps": 1, "num_cpu_threads_per_process": 1, "max_restarts": 0}
    for name, minimum in least.items():
        value = getattr(args, name)
        require(value is None or value >= minimum, f"--{name} must be at least {minimum}, not {value}")


def count_gpus(config: ClusterConfig) -> int:
    """The GPUs of this machine that the configuration lets the processes use."""
    import torch

    if config.gpu_ids == "all":
        return torch.cuda.device_count()
    with patch_environment(CUDA_VISIBLE_DEVICES=config.gpu_ids):
        return torch.cuda.device_count()


def count_processes(config: ClusterConfig) -> int:
    """`num_processes`, else one per GPU of every machine, else one per machine."""
    given_at_launch = config.num_processes == -1
    left_open = config.num_processes is None and config.distributed_type == "MULTI_CPU"
    is_known = not given_at_launch and not left_open
    require(is_known, "the configuration leaves the number of processes open: pass --num_processes")
    if config.num_processes is not None:
        return config.num_processes
    if config.use_cpu or config.distributed_type == "NO":
        return config.num_machines
    return config.num_machines * max(1, count_gpus(config))


def check_devices(config: ClusterConfig) -> None:
    """Raise ConfigError if the configuration wants more GPUs than this machine has."""
    asks_for_gpus = config.distributed_type == "MULTI_GPU" or config.gpu_ids != "all"
    wanted = config.processes_per_machine
    present = count_gpus(config)
    if not asks_for_gpus or wanted <= present:
        return
    gpus = "1 GPU" if wanted == 1 else f"{wanted} GPUs"
    problem = f"this launch needs {gpus} on this machine, which has {present}"
    if config.gpu_ids != "all":
        problem += f" among gpu_ids {config.gpu_ids}"
    way_out = "add --cpu to run on the CPU"
    if present:
        way_out += f", or --num_processes {present * config.num_machines} for fewer"
    raise ConfigError(f"{problem}: {way_out}")


def check_script(args: argparse.Namespace) -> None:
    """Raise ConfigError if the script is a file that is not there."""
    is_file = not args.module and not args.no_python
    if is_file:
        require(os.path.exists(args.training_script), f"no such script: {args.training_script}")


def simple_launcher(args: argparse.Namespace) -> None:
    """Become the script: its signals, its exit code. Does not return."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise ConfigError(f"cannot execute {command[0]}: {error.strerror}") from error


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run torchrun in this process, with one process per GPU or, on the CPU, as many as asked for."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import record

    environment = prepare_multi_gpu_env(args)
    changes = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    script = [args.training_script, *args.training_script_args]
    torchrun_args = _filter_args(args, run.get_args_parser(), script)
    with patch_environment(**changes):
        # `record` hands the first failing rank's error file on to whoever launched the launcher.
        run_recorded = record(run.run)
        run_recorded(torchrun_args)
