"""The state of one process: its rank and device, its settings, its place in the accumulation window.

Each of these three classes has one state for the whole process. All instances of the class use its dictionary,
`_shared_state`, as their `__dict__`, so `PartialState()` can be written anywhere and is always the same state.

    class              attributes                                                   begins with
    PartialState       device, backend, distributed_type, num_processes,            the first PartialState()
                       process_index, local_process_index
    AcceleratorState   copies of these, and mixed_precision, dynamo_plugin,         the first Accelerator()
                       fsdp_plugin; its distributed_type is FSDP if there is one
    GradientState      sync_gradients, plugin_kwargs, dataloader_references         the first GradientState()

A script that has an Accelerator asks `accelerator.state` and `accelerator.gradient_state`.

These events keep a state or end it:

    event                              PartialState   AcceleratorState           GradientState
    another Accelerator                kept           kept, with new compiler    kept, with new settings
    a Trainer, by `_reset_state()`     kept           forgotten                  kept
    the next one after `end_training`  forgotten      forgotten                  begins again
    a notebook launch, one process     set aside,     set aside,                 kept
                                       then back      then back
    a notebook launch, forked process  forgotten      forgotten                  begins again

To forget a state, the class gets a new dictionary. Existing instances keep the old one, by which an Accelerator that
has ended knows its rank. A GradientState begins again in its dictionary, because prepared objects hold it.
"""

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from common.accelerator.rendezvous import join_attempt
from common.launch import LAUNCHER_PRECISION
from common.process_group import leave_process_group

from .environment import parse_choice_from_env, parse_flag_from_env
from .process_environment import GLOO_TIMEOUT, NCCL_TIMEOUT, choose_backend, choose_device, read_processes, share_cores

# `mixed_precision` is one of these.
PRECISIONS = ("no", "fp16", "bf16")


# It is no StrEnum, because scripts print it, and the original prints a member as "DistributedType.MULTI_GPU".
class DistributedType(str, enum.Enum):  # noqa: UP042
    """The kind of a run. Ours are NO, MULTI_CPU, MULTI_GPU and FSDP; the other names exist to be compared with."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"


def is_initialized() -> bool:
    """True if this process has made an Accelerator, and so an AcceleratorState."""
    return bool(AcceleratorState._shared_state)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a function that this process is not to run."""


class PartialState:
    """The process and its device, shared by all instances; the first one joins the process group if there is one.

    If the script has made a process group, that is the run's. Else a WORLD_SIZE over 1 in the environment always means
    one distributed run, on CPU as on GPU: RANK and LOCAL_RANK, and without an `init_method` MASTER_ADDR and MASTER_PORT
    must then be there too (torchrun sets them all), or a ValueError names the missing ones. Under torchrun one process
    is a group of one. Otherwise the run is a single process and needs no group. By default the backend is nccl where
    every process has a GPU of its own, gloo on CPU and where processes share a GPU. LOCAL_RANK picks the device; only
    in a process group of the script's own, without LOCAL_RANK, the rank does.

    Args:
        cpu: stay on the CPU even where there is a GPU.
        kwargs: `backend`, `init_method` and `timeout`, as in `InitProcessGroupKwargs`.

    Attributes:
        device: the device of this process.
        backend: the backend of the process group; None without one.
        distributed_type: a DistributedType.
        num_processes: the world size.
        process_index: the rank.
        local_process_index: the local rank, among the processes of this machine.

    Raises:
        ValueError: for an environment that is incomplete or contradicts itself, for a backend that is not available,
            and where nodes chose different backends.
        TimeoutError: if some rank did not join.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            try:
                self._start(cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), **kwargs)
            except BaseException:
                PartialState._reset_state()  # To the next instance, a half filled state would look initialized.
                raise

    def _start(
        self, cpu: bool, backend: str | None = None, init_method: str | None = None, timeout: timedelta | None = None
    ) -> None:
        gpus = 0
        if not cpu and torch.cuda.is_available():
            gpus = torch.cuda.device_count()
        processes = read_processes(gpus, needs_meeting_point=init_method is None)
        self.num_processes = processes.world_size
        self.process_index = processes.rank
        self.local_process_index = processes.local_rank
        self.device = choose_device(cpu, gpus, processes)
        self.distributed_type = DistributedType.NO
        self.backend: str | None = None
        # After `destroy_process_group` this is true, and the next Accelerator starts afresh.
        self._has_left_group = False
        if not processes.form_a_group:
            return
        self.distributed_type = DistributedType.MULTI_GPU if gpus else DistributedType.MULTI_CPU
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        share_cores(processes.local_world_size)
        if not dist.is_initialized():
            backend = choose_backend(backend, gpus, processes.local_world_size)
            default_timeout = NCCL_TIMEOUT if backend == "nccl" else GLOO_TIMEOUT
            self._join(backend, init_method or "env://", timeout or default_timeout)
        self.backend = dist.get_backend()

    def _join(self, backend: str, init_method: str, timeout: timedelta) -> None:
        """Join the process group after all ranks have met in its store, where a missing rank would be named."""
        rank = self.process_index
        world_size = self.num_processes
        meetings = dist.rendezvous(init_method, rank, world_size, timeout=timeout)
        store, _, _ = next(meetings)
        attempt = join_attempt(store, rank, world_size, timeout, backend)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(attempt, store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # With a device nccl connects at once, so that its errors are raised here and not in a later step.
            device_id=self.device if backend == "nccl" else None,
        )

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state = {}

    @property
    def initialized(self) -> bool:
        return bool(self._shared_state)

    @property
    def default_device(self) -> torch.device:
        """A GPU if this machine has one, else the CPU; `device` is the one of this process."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def use_distributed(self) -> bool:
        """True if there are other processes."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """True on rank 0 only: one process of the whole run."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0: one process per machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank only."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        if self.distributed_type != DistributedType.NO:
            dist.barrier(device_ids=[self.device.index] if self.backend == "nccl" else None)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Leave `group`; by default the process group of the run."""
        if group is None:
            leave_process_group()
            if PartialState._shared_state:
                PartialState()._has_left_group = True
        elif dist.is_initialized():
            dist.destroy_process_group(group)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on rank 0; elsewhere a function that does nothing."""
        return function if self.is_main_process else do_nothing

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on local rank 0 of every machine; elsewhere a function that does nothing."""
        return function if self.is_local_main_process else do_nothing

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` on the last rank; elsewhere a function that does nothing."""
        return function if self.is_last_process else do_nothing

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """`function` on rank `process_index`, and in a single process; elsewhere a function that does nothing.

        Without `function`, a decorator: `@state.on_process(process_index=1)`.
        """
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return function if self.process_index == process_index or not self.use_distributed else do_nothing

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """As `on_process`, on the rank `local_process_index` of each machine."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return function if self.local_process_index == local_process_index or not self.use_distributed else do_nothing

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block before all others do, also when it raises there."""
        return self._run_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Local rank 0 runs the block before the others of its machine do, also when it raises there."""
        return self._run_first(self.is_local_main_process)

    @contextmanager
    def _run_first(self, is_first: bool) -> Iterator[None]:
        """The processes where `is_first` is true run the block, and then the others do."""
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's contiguous share of a list, tuple, tensor or datasets.Dataset, or of each value of a dict.

        Of [0, 1, 2, 3] three processes get [0, 1], [2] and [3]. With `apply_padding` the last element of all fills the
        shorter shares up, to [2, 3] and [3, 3], so that what is computed from them can be gathered. Padded tensors come
        on the device. Anything else that has a length, such as a string, comes whole.

        Raises:
            TypeError: for what has no length, such as a number, on several processes.
            ValueError: if the values of a dict differ in length.
        """
        yield inputs if self.num_processes == 1 else self._split(inputs, apply_padding)

    def _split(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, dict):
            lengths = {len(value) for value in inputs.values()}
            if len(lengths) > 1:
                raise ValueError("All values in the dictionary must have the same length")
            return {key: self._split(value, apply_padding) for key, value in inputs.items()}
        smallest, extra = divmod(len(inputs), self.num_processes)
        has_extra = self.process_index < extra
        start = self.process_index * smallest + min(self.process_index, extra)
        stop = start + smallest + int(has_extra)
        rows = list(range(start, stop))
        if apply_padding and extra and not has_extra:
            rows.append(len(inputs) - 1)
        if isinstance(inputs, list):
            return [inputs[row] for row in rows]
        if isinstance(inputs, tuple):
            return tuple(inputs[row] for row in rows)
        if isinstance(inputs, torch.Tensor):
            return inputs[rows].to(self.device) if apply_padding else inputs[start:stop]
        if hasattr(inputs, "with_format"):  # A datasets.Dataset gives columns where it is indexed with a list.
            return inputs.select(rows)
        return inputs

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)


class AcceleratorState(PartialState):
    """The process, as PartialState has it, and the settings of the Accelerator.

    An Accelerator makes the first one. Its dictionary begins as a copy of PartialState's, since rank, device and group
    are fixed by then. It is a dictionary of its own, so that the settings can be forgotten while the process stays as
    it is: the second Trainer of a notebook may choose another precision.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; by default ACCELERATE_MIXED_PRECISION.
        cpu: stay on the CPU.
        dynamo_plugin: how models are compiled. An Accelerator that gives none keeps that of an earlier one.
        fsdp_plugin: how models are sharded; kept only where there is a process group to share them out to.
        kwargs: those of PartialState.

    Raises:
        ValueError: if no Accelerator has been made yet, for an unknown precision, and for a setting or `cpu=True`
            that the process cannot be given any more.
        NotImplementedError: for fp8, and for fp16 with a sharded model.
    """

    # Programs read these to learn that DeepSpeed and model parallelism are not in use.
    deepspeed_plugin: ClassVar[None] = None
    parallelism_config: ClassVar[None] = None

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        fsdp_plugin: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        self.__dict__ = AcceleratorState._shared_state
        process = PartialState(cpu, **kwargs)
        if cpu and process.device.type != "cpu":
            raise _already_initialized("cpu=True", reason=f"this process runs on {process.device}")
        if self.initialized:
            self._keep_settings(mixed_precision, dynamo_plugin, fsdp_plugin)
        elif _from_accelerator:
            self._choose_settings(process, mixed_precision, dynamo_plugin, fsdp_plugin)
        else:
            raise ValueError(
                "Please make sure to properly initialize your accelerator via `accelerator = Accelerator()` before "
                "you ask for its state; `PartialState()` needs none"
            )

    def _choose_settings(
        self, process: PartialState, mixed_precision: str | None, dynamo_plugin: Any, fsdp_plugin: Any
    ) -> None:
        """Fill this state for the first Accelerator. An error leaves it empty."""
        precision = choose_precision(mixed_precision)
        if process.distributed_type == DistributedType.NO:
            fsdp_plugin = None
        if fsdp_plugin is not None and precision == "fp16":
            raise NotImplementedError("FSDP in fp16 is out of scope: choose mixed_precision 'bf16' or 'no'")
        if fsdp_plugin is not None and process.device.type == "cuda" and process.backend == "gloo":
            raise ValueError("FSDP on GPUs needs nccl, and a GPU for each process")
        self.__dict__.update(process.__dict__)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            fsdp_plugin.warn_of_what_has_no_effect()
        self.dynamo_plugin = dynamo_plugin
        self.fsdp_plugin = fsdp_plugin
        self.mixed_precision = precision

    def _keep_settings(self, mixed_precision: str | None, dynamo_plugin: Any, fsdp_plugin: Any) -> None:
        """Refuse other settings from another Accelerator; of them the compiler alone can be replaced."""
        if mixed_precision is not None and choose_precision(mixed_precision) != self.mixed_precision:
            now = f"this process already runs with '{self.mixed_precision}'"
            raise _already_initialized(f"mixed_precision='{mixed_precision}'", reason=now)
        if fsdp_plugin not in (None, self.fsdp_plugin) and PartialState().distributed_type != DistributedType.NO:
            raise _already_initialized("fsdp_plugin", reason="the first Accelerator chose other FSDP settings, or none")
        if dynamo_plugin is not None:
            self.dynamo_plugin = dynamo_plugin

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Let the next Accelerator choose its settings, and with `reset_partial_state` its process and device too."""
        AcceleratorState._shared_state = {}
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def is_fsdp2(self) -> bool:
        """True where models are sharded."""
        return self.fsdp_plugin is not None


def _already_initialized(setting: str, reason: str) -> ValueError:
    return ValueError(
        f"AcceleratorState has already been initialized and cannot be changed: {reason}. Restart your runtime "
        f"completely and pass `{setting}` to the first `Accelerator()`"
    )


def choose_precision(mixed_precision: str | None) -> str:
    """The precision of this name, in lower case; without a name, what the launcher says."""
    if mixed_precision is None:
        mixed_precision = parse_choice_from_env(LAUNCHER_PRECISION, "no")
    precision = str(mixed_precision).lower()
    if precision == "fp8":
        raise NotImplementedError("mixed_precision='fp8' is out of scope: choose 'no', 'fp16' or 'bf16'")
    if precision not in PRECISIONS:
        raise ValueError(f"Unknown mixed_precision mode: {precision}. Choose between 'no', 'fp16' and 'bf16'")
    return precision


class GradientState:
    """The place of the run in the accumulation window and in its data loaders; shared by all instances.

    Attributes:
        sync_gradients: true in the micro-batch that ends its window: gradients are averaged and the optimizer steps.
        plugin_kwargs: the settings of the GradientAccumulationPlugin that differ from the defaults. A script may
            change them.
        dataloader_references: None and then the prepared loaders that are being iterated over, outermost first.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = GradientState._shared_state
        if not self._shared_state:
            self.sync_gradients = True
            self.dataloader_references: list = [None]
            self.plugin_kwargs: dict[str, Any] = {}
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        return self.plugin_kwargs.get("num_steps", 1)

    @property
    def sync_with_dataloader(self) -> bool:
        """True where the last batch of a loader ends its window."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def sync_each_batch(self) -> bool:
        """True where gradients are averaged over the processes in every micro-batch."""
        return self.plugin_kwargs.get("sync_each_batch", False)

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader being iterated over, or None."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated over."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the active loader has just yielded its last batch."""
        return self.in_dataloader and self.active_dataloader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The `remainder` of the active loader, see `DataLoaderShard`; -1 outside of a loop."""
        return self.active_dataloader.remainder if self.in_dataloader else -1

    def _add_dataloader(self, dataloader: Any) -> None:
        self.dataloader_references.append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        # The search begins at the end, because the inner one of two loops over the same loader ends first. It finds
        # nothing if the state has begun again during the loop.
        for place in reversed(range(len(self.dataloader_references))):
            if self.dataloader_references[place] is dataloader:
                del self.dataloader_references[place]
                return

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set `sync_gradients`, by the name that transformers' Trainer calls."""
        self.sync_gradients = sync_gradients

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()
        GradientState()

    def __reduce__(self) -> tuple:
        """A copy, and what is unpickled, is the state of the process too."""
        return GradientState, ()


def reset_after_end_training() -> None:
    """Let the next Accelerator start afresh, if the last one has left the process group."""
    if PartialState._shared_state.get("_has_left_group"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextmanager
def fresh_states() -> Iterator[None]:
    """Within the block there is no PartialState and no AcceleratorState yet; afterwards there are those of before."""
    process = PartialState._shared_state
    settings = AcceleratorState._shared_state
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        PartialState._shared_state = process
        AcceleratorState._shared_state = settings
