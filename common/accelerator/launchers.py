"""Start processes from a notebook or a test: the function is forked, so it may live in a notebook cell.

Both launchers can be called again and again in one session. They take a free port each time, and leave the caller's
environment, signal handlers, process and precision as they were.
"""

import functools
import gc
import multiprocessing
import signal
import threading
import uuid
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from common.hidden_gpus import hide_gpus
from common.process_group import free_left_group

from .environment import parse_flag_from_env, patch_environment
from .state import AcceleratorState, GradientState, choose_precision, do_nothing, fresh_states

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
THIS_MACHINE = "127.0.0.1"

SignalHandlers = dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "0",
    master_addr: str = THIS_MACHINE,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` in `num_processes` processes on this machine; with one or none, right here.

    By default there is a process for each GPU. Port "0" is a free one. Processes use GPUs where there are any and
    `ACCELERATE_USE_CPU` is not set; a process on the CPU computes with one thread, since the thread pool of the
    notebook does not survive the fork.

    Raises:
        ValueError: for an unknown precision.
        NotImplementedError: for several nodes, which `python -m common.accelerator launch` starts a script on; for
            how the processes are to meet, which on one machine is not open to choice; and on systems that cannot fork.
        RuntimeError: if the notebook has a process group or has used CUDA, which no forked process can use again.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: with the traceback of the rank that failed.
    """
    precision = choose_precision(mixed_precision)
    meeting = (master_addr, node_rank, num_nodes, rdzv_endpoint, rdzv_conf or {}, rdzv_id)
    if meeting != (THIS_MACHINE, 0, 1, "", {}, "none") or rdzv_backend not in ("static", "c10d"):
        raise NotImplementedError("master_addr, node_rank, num_nodes, rdzv_*: a notebook launches on one machine")
    if num_processes is None:
        num_processes = 0 if parse_flag_from_env("ACCELERATE_USE_CPU") else torch.cuda.device_count()
    with patch_environment(ACCELERATE_MIXED_PRECISION=precision):
        if num_processes <= 1:
            # The GradientState stays shared: loaders that the notebook has prepared tell it where they end.
            with fresh_states():
                function(*args)
            return
        _fork(
            function,
            args,
            num_processes,
            use_port,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
        )


def debug_launcher(function: Callable[..., Any], args: tuple = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in `num_processes` processes on the CPU, whatever the machine has.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: with the traceback of the rank that failed.
        RuntimeError, NotImplementedError: as `notebook_launcher`.
    """
    with patch_environment(ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="no"):
        _fork(function, args, num_processes, port="0", max_restarts=0)


def _fork(function: Callable[..., Any], args: tuple, num_processes: int, port: str, **supervision: Any) -> None:
    """Run `function(*args)` in forked processes. `supervision` are settings of torchrun's agent."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check_that_forking_works()
    free_left_group()
    gc.collect()  # a child that frees an object with threads, such as a group, dies: the threads stayed behind
    signals = ",".join(number.name for number in HANDLED_SIGNALS)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{THIS_MACHINE}:{port}",
        run_id=str(uuid.uuid4()),
        local_addr=THIS_MACHINE,
        start_method="fork",
        signals_to_handle=signals,
        **supervision,
    )
    handlers: SignalHandlers = {}
    if threading.current_thread() is threading.main_thread():  # in another thread nobody can set handlers
        handlers = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    with patch_environment(TORCHELASTIC_SIGNALS_TO_HANDLE=signals):
        launch = elastic_launch(config, _in_child(function, handlers))
        try:
            launch(*args)
        finally:
            _set_handlers(handlers)  # torchrun's would keep the notebook from being interrupted


def _check_that_forking_works() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NotImplementedError("this system cannot fork processes: use `python -m common.accelerator launch`")
    if torch.distributed.is_initialized():
        raise RuntimeError("this process has a process group; destroy it before launching processes from here")
    if torch.cuda.is_initialized() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise RuntimeError(
            "CUDA has been used in this notebook, and no forked process can use it again: restart the kernel and touch "
            "GPUs only inside the function that you launch"
        )


def _in_child(function: Callable[..., Any], handlers: SignalHandlers) -> Callable[..., None]:
    """`function` as a forked process runs it, without a result, because that would have to be pickled."""

    @functools.wraps(function)
    def run(*args: Any) -> None:
        _set_handlers(handlers)
        # OpenMP's threads do not survive a fork, and computing with two of them would wait for ever. OpenMP reads its
        # own limit only at the start of a program, so later calls of the function or a library must have no effect.
        torch.set_num_threads(1)
        torch.set_num_threads = do_nothing
        if parse_flag_from_env("ACCELERATE_USE_CPU"):
            hide_gpus()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        function(*args)

    return run


def _set_handlers(handlers: SignalHandlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler or signal.SIG_DFL)  # None: C has set it, and nobody can put it back
