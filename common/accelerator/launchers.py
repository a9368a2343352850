"""Start processes from a notebook or a test: the function is forked, so it may live in a notebook cell.

Both launchers can be called again and again in one session. They take a free port each time, and leave the caller's
environment, signal handlers and accelerator state as they were.
"""

import contextlib
import functools
import signal
import threading
import uuid

import torch

from .state import GradientState, PartialState, parse_flag_from_env
from .utils.environment import patch_environment

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def notebook_launcher(
    function,
    args: tuple = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "0",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` in `num_processes` processes on this machine; with one, right here.

    Port "0" is a free one. Processes use GPUs where there are any and `ACCELERATE_USE_CPU` is not set; a process on
    the CPU computes with one thread, since the thread pool of the notebook does not survive the fork.

    Raises:
        ValueError: for a missing or impossible number of processes.
        NotImplementedError: for several nodes, which `python -m common.accelerator launch` starts a script on, and for
            how the processes are to meet, which on one machine is not open to choice.
        RuntimeError: if the notebook has a process group or has used CUDA, which no forked process can use again.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: with the traceback of the rank that failed.
    """
    nodes, meeting = (node_rank, num_nodes), (master_addr, rdzv_endpoint, rdzv_conf or {}, rdzv_id)
    if nodes != (0, 1) or meeting != ("127.0.0.1", "", {}, "none") or rdzv_backend not in ("static", "c10d"):
        raise NotImplementedError("master_addr, node_rank, num_nodes, rdzv_*: a notebook launches on one machine")
    gpus = 0 if parse_flag_from_env("ACCELERATE_USE_CPU") else torch.cuda.device_count()
    num_processes = gpus if num_processes is None else num_processes
    if num_processes < 1:
        raise ValueError(f"pass a positive num_processes, not {num_processes}, which is the number of GPUs by default")
    with patch_environment(ACCELERATE_MIXED_PRECISION=mixed_precision.lower()):
        if num_processes == 1:
            with _fresh_state():
                function(*args)
            return
        restarts = {"max_restarts": max_restarts, "monitor_interval": monitor_interval}
        _fork(function, args, num_processes, use_port, log_line_prefix_template=log_line_prefix_template, **restarts)


def debug_launcher(function, args: tuple = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in `num_processes` processes on the CPU, whatever the machine has.

    Raises what notebook_launcher raises.
    """
    with patch_environment(ACCELERATE_USE_CPU="true"):
        notebook_launcher(function, args, num_processes)


def _fork(function, args: tuple, num_processes: int, port: str, **config) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if torch.distributed.is_initialized():
        raise RuntimeError("this process has a process group; destroy it before launching processes from here")
    if torch.cuda.is_initialized() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        used = "CUDA has been used in this notebook, and no forked process can use it again"
        raise RuntimeError(f"{used}: restart the kernel and touch GPUs only inside the function that you launch")
    names = ",".join(number.name for number in HANDLED_SIGNALS)
    config |= {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": num_processes}
    config |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "run_id": str(uuid.uuid4())}
    config |= {"local_addr": "127.0.0.1", "start_method": "fork", "signals_to_handle": names}
    with patch_environment(TORCHELASTIC_SIGNALS_TO_HANDLE=names), _signal_handlers_kept() as handlers:
        elastic_launch(LaunchConfig(**config), _in_child(function, handlers))(*args)


def _in_child(function, handlers: dict):
    @functools.wraps(function)
    def run(*args) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        # OpenMP's threads stayed behind in the parent; whoever asked for a second one would wait for it for ever.
        torch.set_num_threads(1)
        torch.set_num_threads = lambda number: None
        with _fresh_state():
            function(*args)  # its result is dropped: it would have to be pickled

    return run


@contextlib.contextmanager
def _fresh_state():
    """The function sees no Accelerator of the notebook's, and the notebook none of the function's."""
    kept = {state: state._shared_state for state in (PartialState, GradientState)}
    for state in kept:
        state._reset_state()
    try:
        yield
    finally:
        for state, shared in kept.items():
            state._shared_state = shared


@contextlib.contextmanager
def _signal_handlers_kept():
    """torchrun's machinery leaves handlers of its own behind: the notebook could no longer be interrupted."""
    main = threading.current_thread() is threading.main_thread()  # elsewhere it leaves the handlers alone
    handlers = {number: signal.getsignal(number) for number in HANDLED_SIGNALS if main}
    try:
        yield handlers
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
