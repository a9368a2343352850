"""Run a script in one or many processes: the configuration file and the flags become a torchrun command.

    launch [--config_file F.yaml] [--num_processes N] … script.py [its arguments]

Flags win over the file; without `--config_file` it is the default file, if there is one. What the script itself has to
know (mixed precision, accumulation, CPU, debug mode) travels in the ACCELERATE_* variables of the original. One process
on one machine is simply this interpreter running the script.
"""

import dataclasses
import os
import signal
import sys

from ..state import available_cores
from .config.config_args import READERS, ClusterConfig, ConfigError, load_config_from_file, require


def add_arguments(parser) -> None:
    add = parser.add_argument
    add("--config_file", help="YAML that `config` wrote")
    add("--num_processes", type=int, help="of all machines together")
    add("--num_machines", type=int)
    add("--machine_rank", type=int, help="of this machine, from 0")
    add("--main_process_ip", help="address of machine 0")
    add("--main_process_port", type=int, help="where the machines meet; 0, the default on one machine, is a free port")
    add("--rdzv_backend", help="static or c10d")
    add("--mixed_precision", help="no, fp16 or bf16")
    add("--gradient_accumulation_steps", type=int)
    add("--cpu", action="store_true", help="train on the CPU whatever the file says")
    add("--multi_gpu", action="store_true", help="one GPU per process, or an error")
    add("--gpu_ids", help="devices of this machine to use, as 0,1")
    add("--num_cpu_threads_per_process", type=int, help="by default the cores shared out")
    add("--debug", action="store_true", help="check every collective (ACCELERATE_DEBUG_MODE)")
    add("--max_restarts", type=int, default=0, help="how often to start all processes again after a failure")
    add("-m", "--module", action="store_true", help="the script is a module's name, as for `python -m`")
    add("training_script")
    add("training_script_args", nargs="...")


def run(args) -> int:
    config = merge(load_config_from_file(args.config_file), args)
    os.environ.update(launch_environment(config, args))
    config.num_processes = count_processes(config)
    check_devices(config)
    require(args.module or os.path.exists(args.training_script), f"no such script: {args.training_script}")
    if config.num_processes == 1 and not args.max_restarts:
        run_plainly(args)
    # torchrun would give each process one thread; the cores that are there, shared out, are what one wants.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // config.processes_per_machine)))
    # A machine that comes back after a loss could not join: torch 2.15 says only once where the ranks meet.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(config.num_machines > 1)))
    return run_torchrun(torchrun_arguments(config, args))


def merge(config: ClusterConfig, args) -> ClusterConfig:
    """The file's settings under the flags'. `--cpu` takes back all that the file says about GPUs."""
    require(not (args.cpu and args.multi_gpu), "--cpu and --multi_gpu exclude each other")
    flags = {name: value for name, value in vars(args).items() if value is not None and value is not False}
    given = {name: READERS[name](f"--{name}", value) for name, value in flags.items() if name in READERS}
    config = dataclasses.replace(config, **given)
    if args.cpu:
        config.distributed_type, config.use_cpu, config.gpu_ids = None, True, "all"
    elif args.multi_gpu:
        config.distributed_type = "MULTI_GPU"
    elif args.num_processes is not None and config.distributed_type == "NO":
        config.distributed_type = None
    config.check()
    return config


def count_processes(config: ClusterConfig) -> int:
    """`num_processes`, else one per GPU of every machine, else one per machine."""
    import torch

    given = config.num_processes != -1 and (config.num_processes or config.distributed_type != "MULTI_CPU")
    require(given, "the configuration leaves the number of processes open: pass --num_processes")
    alone = config.use_cpu or config.distributed_type == "NO"
    return config.num_processes or config.num_machines * (1 if alone else max(1, torch.cuda.device_count()))


def check_devices(config: ClusterConfig) -> None:
    """Raise ConfigError if the configuration wants more GPUs than this machine has."""
    import torch

    asks = config.distributed_type == "MULTI_GPU" or config.gpu_ids != "all"
    wanted, present = config.processes_per_machine, torch.cuda.device_count()
    needs = f"this launch needs {wanted} GPU{'s' * (wanted > 1)} on this machine, which has {present}"
    among = "" if config.gpu_ids == "all" else f" among gpu_ids {config.gpu_ids}"
    fewer = f", or --num_processes {present * config.num_machines} for fewer" if present else ""
    require(present >= wanted or not asks, f"{needs}{among}: add --cpu to run on the CPU{fewer}")


def launch_environment(config: ClusterConfig, args) -> dict[str, str]:
    """The variables that carry the launch's settings into the script; what nobody asked for is not set."""
    steps, threads = args.gradient_accumulation_steps, args.num_cpu_threads_per_process
    require(steps is None or steps >= 1, f"--gradient_accumulation_steps must be at least 1, not {steps}")
    require(threads is None or threads >= 1, f"--num_cpu_threads_per_process must be at least 1, not {threads}")
    environment = {
        "ACCELERATE_MIXED_PRECISION": config.mixed_precision,
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps,
        "ACCELERATE_USE_CPU": "true" if config.on_cpu else None,
        "ACCELERATE_DEBUG_MODE": "1" if config.debug else None,
        "CUDA_VISIBLE_DEVICES": config.gpu_ids if config.gpu_ids != "all" else None,
        "OMP_NUM_THREADS": threads,
        "ACCELERATE_CPU_THREADS": threads,  # torchrun sets the other one too, to 1
    }
    return {name: str(value) for name, value in environment.items() if value is not None}


def command(args) -> list[str]:
    return [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]


def run_plainly(args) -> None:
    """Become the script: its signals, its exit code. Left-over ranks of an outer job are no part of a world of one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command(args)])


def torchrun_arguments(config: ClusterConfig, args) -> list[str]:
    """The same launch as a torchrun command line."""
    arguments = [f"--nnodes={config.num_machines}", f"--nproc-per-node={config.processes_per_machine}"]
    if not config.main_process_port:
        arguments.append("--standalone")
    else:
        arguments += [f"--rdzv-endpoint={config.main_process_ip or '127.0.0.1'}:{config.main_process_port}"]
        # With c10d say who serves the meeting point, which torch would guess from host names.
        host = f"--rdzv-conf=is_host={int(config.machine_rank == 0)}"
        which = host if config.rdzv_backend == "c10d" else f"--node-rank={config.machine_rank}"
        arguments += [f"--rdzv-backend={config.rdzv_backend}", which]
    return [*arguments, f"--max-restarts={args.max_restarts}", *command(args)]


def run_torchrun(arguments: list[str]) -> int:
    """Run torchrun in this process; the exit code is 1 after a failed rank, 128 + n after signal n to the launcher."""
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        # `record` hands the first failing rank's error file on to whoever launched the launcher.
        record(run.run)(run.parse_args(arguments))
    except ChildFailedError as job:
        # A signal that torchrun did not send is the cause; times are in whole seconds, the agent's for a killed rank.
        rank = min((f.exitcode == -signal.SIGTERM, f.exitcode > 0, f.timestamp, r) for r, f in job.failures.items())[3]
        failure = job.failures[rank]
        how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else f"ended by {failure.signal_name()}"
        where = f"local rank {failure.local_rank}, pid {failure.pid}"
        print(f"launch: rank {rank} failed: {how} ({where})", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"launch: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + error.sigval
    except (DistError, RendezvousError) as error:
        raise ConfigError(f"the machines did not meet: {str(error).splitlines()[0]}") from error
    return 0
