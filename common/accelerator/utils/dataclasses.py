"""The settings that an Accelerator is built with, and the enumerations that they use."""

import copy
import enum
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..environment import str_to_bool
from ..logging import get_logger
from ..state import DistributedType  # noqa: F401

logger = get_logger(__name__)


class BaseEnum(enum.Enum):
    """An enumeration whose members are written as their values."""

    def __str__(self) -> str:
        return self.value


class PrecisionType(str, BaseEnum):
    """The numbers in which the forward computes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(str, BaseEnum):
    """The random number generators that processes can be made to share."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"


class LoggerType(str, BaseEnum):
    """Trackers known by name. JSON lines is built in and is not in the original; TensorBoard needs its package."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    JSONL = "jsonl"


class DDPCommunicationHookType(str, BaseEnum):
    """Compression of gradients while they travel between the processes of DistributedDataParallel."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(str, BaseEnum):
    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class KwargsHandler:
    """The base of dataclasses whose fields are keyword arguments of something else."""

    def to_dict(self) -> dict[str, Any]:
        """A deep copy of the attributes."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The attributes that differ from the defaults."""
        default = type(self)().to_dict()
        return {key: value for key, value in self.to_dict().items() if default[key] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `DistributedDataParallel`, and the communication hook of the prepared model.

    Args:
        comm_hook: how gradients are compressed while they travel: to fp16, to bf16, or by PowerSGD to matrices of low
            rank (https://arxiv.org/abs/1905.13727).
        comm_wrapper: fp16 or bf16, into which the result of `comm_hook` is compressed further.
        comm_state_option: keyword arguments of torch's `PowerSGDState`.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The attributes that are arguments of DistributedDataParallel."""
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Make `model` reduce its gradients by `comm_hook`, if there is one."""
        kind = DDPCommunicationHookType
        if self.comm_hook == kind.NO:
            return
        # Here, because it imports numpy, which a run without a hook does not need.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks = {
            kind.FP16: default_hooks.fp16_compress_hook,
            kind.BF16: default_hooks.bf16_compress_hook,
            kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        hook: Any = hooks[self.comm_hook]
        if self.comm_wrapper == kind.FP16:
            hook = default_hooks.fp16_compress_wrapper(hook)
        elif self.comm_wrapper == kind.BF16:
            hook = default_hooks.bf16_compress_wrapper(hook)
        state = None
        if self.comm_hook in (kind.POWER_SGD, kind.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        model.register_comm_hook(state, hook)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, which fp16 needs."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `init_process_group`. The default backend stands for the one that fits the device.

    `timeout` is how long a collective waits for a missing rank: by default 10 minutes on nccl, 30 on gloo.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`; see `Accelerator.profile`.

    Args:
        activities: the devices to record: "cpu", "cuda". By default all that torch supports here.
        schedule_option: arguments of `torch.profiler.schedule`: "wait", "warmup", "active", "repeat", "skip_first".
        on_trace_ready: called with the profiler whenever a cycle of the schedule is complete.
        record_shapes: keep the shapes of operators' inputs.
        profile_memory: keep allocations.
        with_stack: keep the source line of each operator.
        with_flops: estimate floating point operations.
        with_modules: keep the module of each operator.
        output_trace_dir: write `profile_{process_index}.json`, for chrome://tracing, into this folder.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """The profiler with these settings, not yet started.

        Raises:
            ValueError: for an activity that torch cannot record here.
        """
        known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        for activity in self.activities or []:
            if activity not in known:
                raise ValueError(f"Invalid profiler activity: {activity}. Must be one of {list(known)}.")
        activities = None if self.activities is None else [known[activity] for activity in self.activities]
        schedule = None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class DataLoaderConfiguration:
    """The way in which prepared loaders share the data among the processes.

    Args:
        split_batches: a batch of the script's loader is split over the processes, so that its batch size is the
            global one; otherwise every process gets whole batches, and the global batch is that many times larger.
        dispatch_batches: True lets the main process load for all, see DataLoaderDispatcher; False loads everywhere.
            None dispatches streams alone.
        even_batches: repeat samples from the start so that all processes make equally many full steps.
        use_seedable_sampler: epoch e of a shuffled loader visits `torch.randperm(n)` seeded with `data_seed + e`.
            Otherwise it visits what the generators of sampler and torch draw.
        data_seed: the seed of a seedable sampler; by default `torch.initial_seed()` of rank 0.
        non_blocking: copy to the device without waiting. It has an effect only with `pin_memory`.
        use_stateful_dataloader: checkpoints hold the positions of loaders, and after `load_state` the next `for`
            continues there. Otherwise the script says where to go on: see `skip_first_batches`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """The folders of logs and checkpoints.

    Args:
        project_dir: the folder of the project.
        logging_dir: where trackers write their files; `project_dir` by default.
        automatic_checkpoint_naming: save to `project_dir/checkpoints/checkpoint_{iteration}`.
        total_limit: complete checkpoints to keep under automatic naming; older ones go after a new one is complete.
        iteration: the number of the next checkpoint.
        save_on_each_node: write on every machine, for folders that they do not share. `load_state()` takes the newest
            checkpoint of the first machine. It raises if another one does not have that: name an older one then.
    """

    project_dir: str | os.PathLike | None = None
    logging_dir: str | os.PathLike | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike | None = None) -> None:
        """Change `project_dir`. `logging_dir` becomes the same folder if it is None, and else stays as it is."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """The micro-batches of an optimizer step.

    Args:
        num_steps: micro-batches in a window.
        adjust_scheduler: accepted for compatibility; has no effect.
        sync_with_dataloader: the last batch of a loader ends its window, however short.
        sync_each_batch: average gradients over the processes in every micro-batch: less memory, more traffic.

    Raises:
        ValueError: if `num_steps` is less than 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"a window has at least one micro-batch, not {self.num_steps}")


def _to_bool(value: Any) -> bool:
    return str_to_bool(str(value)) == 1


def _to_name(value: Any) -> str:
    return str(getattr(value, "name", value)).upper()  # torch has an enumeration of the kinds of state dicts


def _to_list(value: list[str] | str | None) -> list[str] | None:
    return value.split(",") if isinstance(value, str) else value


# By each setting: the launcher's variable, the default, and the function that makes a value of what is given.
_FSDP_SETTINGS: dict[str, tuple[str, Any, Callable[[Any], Any]]] = {
    "fsdp_version": ("FSDP_VERSION", 1, int),
    "reshard_after_forward": ("FSDP_RESHARD_AFTER_FORWARD", True, _to_bool),
    "auto_wrap_policy": ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP", _to_name),
    "cpu_offload": ("FSDP_OFFLOAD_PARAMS", False, _to_bool),
    "state_dict_type": ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT", _to_name),
    "activation_checkpointing": ("FSDP_ACTIVATION_CHECKPOINTING", False, _to_bool),
    "transformer_cls_names_to_wrap": ("FSDP_TRANSFORMER_CLS_TO_WRAP", None, _to_list),
    "min_num_params": ("FSDP_MIN_NUM_PARAMS", 0, int),
}
_OF_FSDP_1 = ("backward_prefetch", "sync_module_states", "use_orig_params")
_FSDP_WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


@dataclass(kw_only=True)
class FullyShardedDataParallelPlugin:
    """How models are sharded, by version 2 of torch's FSDP; see `utils/fsdp_utils.py`.

    A setting that is not given here is read from the launcher's variable FSDP_…, else it has the default. Flags and
    numbers may be texts, as they are there; afterwards they are bools and ints.

    Args:
        fsdp_version: must be 2. Left out it is 1, as in the original, and refused: version 1 is out of scope.
        reshard_after_forward: free the gathered parameters of a layer after its forward, and gather them again for its
            backward: less memory, more traffic. On by default.
        auto_wrap_policy: which layers are gathered one after the other: "transformer_based_wrap", "size_based_wrap" or
            "no_wrap", by which the whole model is gathered at once.
        cpu_offload: out of scope; only False passes.
        state_dict_type: "FULL_STATE_DICT"; "SHARDED_STATE_DICT" means the same here.
        activation_checkpointing: keep only the inputs of these layers, and compute their forward again in backward.
        transformer_cls_names_to_wrap: names of classes, as a list or with commas; by default the model's
            `_no_split_modules`.
        min_num_params: "size_based_wrap" gathers layers with more parameters than this apart; none if it is 0, as by
            default.
        cpu_ram_efficient_loading: has no effect: all ranks always start from rank 0's weights.
        backward_prefetch, sync_module_states, use_orig_params: settings of version 1; they have no effect.

    Raises:
        NotImplementedError: for what is out of scope.
        ValueError: for a value that is none of these.
    """

    fsdp_version: int | str | None = None
    reshard_after_forward: Any = None
    auto_wrap_policy: str | None = None
    cpu_offload: bool | str | None = None
    state_dict_type: Any = None
    activation_checkpointing: bool | str | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: Any = None
    cpu_ram_efficient_loading: bool | None = None
    backward_prefetch: Any = None
    sync_module_states: bool | None = None
    use_orig_params: bool | None = None

    def __post_init__(self) -> None:
        if callable(self.auto_wrap_policy):
            raise NotImplementedError("an auto_wrap_policy that is a function is out of scope: name a policy")
        for name, (variable, default, convert) in _FSDP_SETTINGS.items():
            value = getattr(self, name)
            if value is None:
                value = os.environ.get(variable, default)
            try:
                setattr(self, name, convert(value))
            except ValueError:
                expected = "a whole number" if convert is int else "true or false"
                raise ValueError(f"{name} must be {expected}, not {value!r}") from None
        self.without_effect = []
        for name in _OF_FSDP_1:
            if getattr(self, name) is not None or f"FSDP_{name.upper()}" in os.environ:
                self.without_effect.append(name)
            setattr(self, name, None)
        self._require_scope()

    def _require_scope(self) -> None:
        if self.fsdp_version != 2:
            raise NotImplementedError(f"FSDP of version {self.fsdp_version} is out of scope: fsdp_version must be 2")
        if self.cpu_offload:
            raise NotImplementedError("FSDP with cpu_offload=True is out of scope")
        if self.state_dict_type not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            raise NotImplementedError(
                f"FSDP with state_dict_type={self.state_dict_type} is out of scope: choose FULL_STATE_DICT"
            )
        if self.auto_wrap_policy not in _FSDP_WRAP_POLICIES:
            raise ValueError(f"auto_wrap_policy {self.auto_wrap_policy!r} is none of {', '.join(_FSDP_WRAP_POLICIES)}")
        if self.activation_checkpointing and self.auto_wrap_policy == "NO_WRAP":
            raise ValueError("activation_checkpointing needs an auto_wrap_policy, which says for which layers")

    def warn_of_what_has_no_effect(self) -> None:
        for name in self.without_effect:
            logger.warning(f"{name} has no effect: it is a setting of FSDP's version 1")
        if self.state_dict_type == "SHARDED_STATE_DICT":
            logger.warning("state_dict_type=SHARDED_STATE_DICT has no effect: checkpoints hold whole tensors")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of `torch.compile`.

    Args:
        backend: a DynamoBackend, in upper or lower case; "no" does not compile.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: raise where the model cannot be one graph.
        dynamic: trace with dynamic shapes.
        options: arguments of the backend.
        disable: let `torch.compile` do nothing.

    Raises:
        ValueError: for an unknown backend.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False

    def __post_init__(self) -> None:
        self.backend = DynamoBackend(str(self.backend or "no").upper())

    def to_dict(self) -> dict[str, Any]:
        """The attributes, with the backend by the name that torch has for it."""
        settings = super().to_dict()
        settings["backend"] = DynamoBackend(self.backend).value.lower()
        return settings
