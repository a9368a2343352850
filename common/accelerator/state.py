"""Who am I among the processes, on which device, and where in the accumulation window: three shared states."""

import enum
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist

# Its functions take the group of the moment of this import as their default. Imported later (the first optimizer does
# it) they keep that group and its threads for ever, and a thread that outlives the interpreter aborts the process:
# https://github.com/pytorch/pytorch/issues/190489
import torch.distributed.nn.functional

# What kind of run this is. Ours are NO, MULTI_CPU and MULTI_GPU; the other names exist to be compared with.
_KINDS = "NO _CPU _GPU _NPU _MLU _SDAA _MUSA _XPU DEEPSPEED FSDP XLA MEGATRON_LM _HPU _NEURON".replace(" _", " MULTI_")
DistributedType = enum.StrEnum("DistributedType", {kind: kind for kind in _KINDS.split()})


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for y, yes, t, true, on and 1; 0 for n, no, f, false, off and 0; any other text is a ValueError."""
    for number, words in enumerate(("n no f false off 0", "y yes t true on 1")):
        if value.lower() in words.split():
            return bool(number) if to_bool else number
    raise ValueError(f"invalid truth value {value!r}")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The environment variable `key` as a truth value."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


class PartialState:
    """The process and its device, shared by all instances; the first one joins the process group if there is one.

    A WORLD_SIZE over 1 in the environment always means one distributed run, on CPU as on GPU: RANK, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT must then be there too (torchrun sets them all), or a ValueError names the missing
    ones. Without it the run is a single process and needs no group. The backend is nccl where every process has a
    GPU of its own, gloo on CPU and where processes share a GPU; LOCAL_RANK, never RANK, picks the device.

    Args:
        cpu: stay on the CPU even where there is a GPU.
        kwargs: of `InitProcessGroupKwargs`: `backend`, `init_method`, `timeout`.

    Attributes:
        device, backend (None without a group), distributed_type, num_processes, process_index,
        local_process_index, debug (ACCELERATE_DEBUG_MODE: mismatched collectives raise instead of hanging).
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs) -> None:
        self.__dict__ = PartialState._shared_state
        if not self.initialized:
            self._start(cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), **kwargs)

    def _start(self, cpu: bool, backend: str | None = None, init_method: str | None = None, timeout=None) -> None:
        self.debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        self.num_processes = int(os.environ.get("WORLD_SIZE", 1))
        self.process_index = self.local_process_index = 0
        self.distributed_type, self.backend, self._owns_group = DistributedType.NO, None, False
        device_type = _device_type(cpu)
        if self.num_processes == 1 and not dist.is_initialized():
            self.device = torch.device(os.environ.get("ACCELERATE_TORCH_DEVICE", device_type))
            return
        if dist.is_initialized():  # by the script itself: join what is there
            self.num_processes, self.process_index = dist.get_world_size(), dist.get_rank()
            self.local_process_index = int(os.environ.get("LOCAL_RANK", self.process_index))
        else:
            names = ("RANK", "LOCAL_RANK", *(() if init_method else ("MASTER_ADDR", "MASTER_PORT")))
            missing = [name for name in names if not os.environ.get(name)]
            if missing:
                raise ValueError(f"WORLD_SIZE={self.num_processes} needs {', '.join(missing)} too: start with torchrun")
            self.process_index, self.local_process_index = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        devices = torch.cuda.device_count() if device_type == "cuda" else 0
        # Without LOCAL_WORLD_SIZE one process per GPU is assumed, as under Slurm.
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", min(self.num_processes, devices or 2**31)))
        if not (0 <= self.process_index < self.num_processes and 0 <= self.local_process_index < local_processes):
            where = f"RANK={self.process_index} of WORLD_SIZE={self.num_processes}"
            here = f"LOCAL_RANK={self.local_process_index} of {local_processes} (LOCAL_WORLD_SIZE, else {devices} GPUs)"
            raise ValueError(f"{where} and {here} do not fit together")
        if devices:
            self.distributed_type = DistributedType.MULTI_GPU
            device = torch.device("cuda", self.local_process_index % devices)
            torch.cuda.set_device(device)
        else:
            self.distributed_type, device = DistributedType.MULTI_CPU, torch.device("cpu")
            # torchrun grants one thread per process, whatever the number of cores; our launcher may say how many.
            threads = os.environ.get("ACCELERATE_CPU_THREADS") or max(1, available_cores() // local_processes)
            torch.set_num_threads(int(threads))
        if not dist.is_initialized():
            backend = backend or ("nccl" if 0 < local_processes <= devices else "gloo")
            self._join(backend, init_method or "env://", timeout or timedelta(minutes=10 if backend == "nccl" else 30))
        self.backend = dist.get_backend()
        self.device = device  # last: it tells that all went well

    def _join(self, backend: str, init_method: str, timeout: timedelta) -> None:
        self._debug_level = dist.get_debug_level()
        if self.debug:
            # In groups built at this level torch compares every collective's fingerprint over the ranks.
            dist.set_debug_level(dist.DebugLevel.DETAIL)
            # When a DDP on such a group logs how it was made, torch 2.15 takes the group for a bare gloo group, reads
            # beside it, and crashes.
            dist.Logger.set_construction_data_and_log = lambda *_: None
        rank, world_size = self.process_index, self.num_processes
        store = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))[0]
        store = dist.PrefixStore(_meet(store, rank, world_size, timeout), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        self._owns_group = True

    def __repr__(self) -> str:
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return "\n".join(f"{name.replace('_', ' ').capitalize()}: {value}" for name, value in public.items())

    @staticmethod
    def _reset_state() -> None:
        """Forget everything: the next instance reads the environment anew. Instances made before keep what they had."""
        PartialState._shared_state = {}

    initialized = property(lambda self: "device" in self.__dict__)
    use_distributed = property(lambda self: self.num_processes > 1)

    @property
    def is_main_process(self) -> bool:
        """True on rank 0 only: one process of the whole run."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0: one process per machine."""
        return self.local_process_index == 0

    is_last_process = property(lambda self: self.process_index == self.num_processes - 1)

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        if self.use_distributed:
            dist.barrier(device_ids=[self.device.index] if self.backend == "nccl" else None)

    def destroy_process_group(self, group=None) -> None:
        """Leave `group`; by default the process group of the run, if this state joined it. Others are their makers'."""
        if group is not None:
            dist.destroy_process_group(group)
        elif self._owns_group:
            self._owns_group = False
            dist.destroy_process_group()
            dist.set_debug_level(self._debug_level)
            # Its threads need the GIL to let go of the last tensors. A DDP that outlives the group holds the GIL while
            # it frees the group and waits for them: with torch 2.11 for ever, without this.
            time.sleep(0.01)

    def on_process(self, function: Callable | None = None, process_index: int | None = None) -> Callable:
        """`function`, called on rank `process_index` (and in a single process) and returning None elsewhere."""
        return _only_if(lambda: process_index == self.process_index or not self.use_distributed, function)

    def on_local_process(self, function: Callable | None = None, local_process_index: int | None = None) -> Callable:
        """`function`, called on local rank `local_process_index` of every machine and returning None elsewhere."""
        return _only_if(lambda: local_process_index == self.local_process_index or not self.use_distributed, function)

    def on_main_process(self, function: Callable) -> Callable:
        """`function`, called on rank 0 and returning None elsewhere."""
        return _only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable) -> Callable:
        """`function`, called on local rank 0 of every machine and returning None elsewhere."""
        return _only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable) -> Callable:
        """`function`, called on the last rank and returning None elsewhere."""
        return _only_if(lambda: self.is_last_process, function)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block before all others do, also when it raises there."""
        yield from self._goes_first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Local rank 0 runs the block before the others of its machine do, also when it raises there."""
        yield from self._goes_first(self.is_local_main_process)

    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's contiguous share of a list, tuple, tensor, string or datasets.Dataset, or a dict of them.

        The first `len(inputs) % num_processes` processes get one element more; with `apply_padding` the others repeat
        the last element, so that what is computed from the shares can be gathered.

        Raises:
            ValueError: if the values of a dict differ in length.
        """
        yield self._share(inputs, apply_padding) if self.use_distributed else inputs

    def _share(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, dict):
            if len({len(value) for value in inputs.values()}) > 1:
                raise ValueError("All values in the dictionary must have the same length")
            return {key: self._share(value, apply_padding) for key, value in inputs.items()}
        least, extra = divmod(len(inputs), self.num_processes)
        start = self.process_index * least + min(self.process_index, extra)
        stop = start + least + (self.process_index < extra)
        lacking = start + least + (extra > 0) - stop if apply_padding else 0
        if isinstance(inputs, (list, tuple, str)):
            return inputs[start:stop] + inputs[-1:] * lacking
        rows = [*range(start, stop), *[len(inputs) - 1] * lacking]
        return inputs.select(rows) if hasattr(inputs, "with_format") else inputs[rows]  # indexed, a Dataset is a dict

    def print(self, *args, **kwargs) -> None:
        """`print`, once per machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)


def _only_if(condition: Callable[[], bool], function: Callable | None) -> Callable:
    if function is None:  # as in `@state.on_process(process_index=1)`
        return partial(_only_if, condition)

    @wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs) if condition() else None

    return run


def available_cores() -> int:
    """The CPU cores this process is allowed to run on; where the system cannot tell (macOS), all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device_type(cpu: bool) -> str:
    if not cpu and torch.cuda.is_available():
        return "cuda"
    return "mps" if not cpu and torch.backends.mps.is_available() else "cpu"


def _meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this attempt that all its ranks agree on and no earlier attempt used.

    torchrun keeps one store over restarts, and a group set up a second time finds the addresses of the dead ranks
    under the old keys. The restart count does not tell attempts apart: a change of membership leaves it as it was. So
    rank 0 picks the name and hands it to every rank that presents a token made just now.

    Raises:
        TimeoutError: on rank 0, naming the ranks that did not show up.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"meet/token/{rank}", token)
        name = store.get(f"meet/name/{token}").decode()
        store.set(f"meet/{name}/{rank}", "here")
        return name
    name, absent, deadline = uuid.uuid4().hex, set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while absent:
        for other in sorted(absent):
            if store.check([f"meet/{name}/{other}"]):
                absent.remove(other)
            elif store.check([f"meet/token/{other}"]):
                store.set(f"meet/name/{store.get(f'meet/token/{other}').decode()}", name)
        if absent and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} of {world_size} did not join within {timeout}")
        time.sleep(0.005)
    return name


class AcceleratorState(PartialState):
    """PartialState plus the mixed precision of the run ("no", "fp16" or "bf16"). Plugins are None, as scripts ask.

    Raises:
        ValueError: for an unknown precision, or one that differs from what the process already runs with.
        NotImplementedError: for fp8.
    """

    deepspeed_plugin = fsdp_plugin = torch_tp_plugin = parallelism_config = None

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs) -> None:
        if cpu and PartialState._shared_state.get("device", torch.device("cpu")).type != "cpu":
            raise ValueError("cpu=True came too late: this process already runs on an accelerator device")
        super().__init__(cpu, **kwargs)
        wanted = str(mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
        if wanted == "fp8":
            raise NotImplementedError("mixed_precision='fp8' is out of scope: choose 'no', 'fp16' or 'bf16'")
        if wanted not in ("no", "fp16", "bf16"):
            raise ValueError(f"Unknown mixed_precision mode: {wanted}. Choose between 'no', 'fp16' and 'bf16'")
        current = self.__dict__.setdefault("mixed_precision", wanted)
        if mixed_precision is not None and wanted != current:
            raise ValueError(f"mixed_precision='{wanted}' came too late: this process already runs with '{current}'")

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the precision, and with `reset_partial_state` the process and its device too."""
        kept = {} if reset_partial_state else PartialState._shared_state
        PartialState._shared_state = {name: value for name, value in kept.items() if name != "mixed_precision"}


def is_initialized() -> bool:
    """Whether this process has a state yet."""
    return "device" in PartialState._shared_state


class GradientState:
    """Where the run stands in the accumulation window and in its data loaders; shared by all instances.

    Attributes:
        sync_gradients: whether this micro-batch ends its window, so that gradients are averaged and the optimizer
            steps.
        num_steps, adjust_scheduler, sync_with_dataloader: of the GradientAccumulationPlugin.
        dataloader_references: the prepared loaders that are being iterated over, outermost first.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin=None) -> None:
        self.__dict__ = GradientState._shared_state
        if not self.initialized:
            self.sync_gradients, self.dataloader_references = True, []
        if not self.initialized or gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs() if gradient_accumulation_plugin else {}
            # Plain attributes: `accumulate` reads them in every step.
            self.num_steps, self.adjust_scheduler = 1, False
            self.sync_with_dataloader, self.sync_each_batch = True, False
            self.__dict__.update(self.plugin_kwargs)

    initialized = property(lambda self: "num_steps" in self.__dict__)
    in_dataloader = property(lambda self: bool(self.dataloader_references))

    @property
    def active_dataloader(self):
        """The innermost prepared loader being iterated over, or None."""
        return self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has just yielded its last batch."""
        return self.in_dataloader and self.dataloader_references[-1].end_of_dataloader

    @staticmethod
    def _reset_state() -> None:
        """Forget everything; instances made before keep what they had."""
        GradientState._shared_state = {}
