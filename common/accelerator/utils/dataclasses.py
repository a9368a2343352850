"""The settings that an Accelerator is built with, and the enumerations they speak in."""

import copy
import enum
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..state import DistributedType  # noqa: F401

PrecisionType = enum.StrEnum("PrecisionType", "NO FP16 BF16")
# The generators that processes can be made to share.
RNGType = enum.StrEnum("RNGType", "TORCH CUDA GENERATOR")
# Trackers known by name: JSON lines is built in, the others need their package.
LoggerType = enum.StrEnum("LoggerType", "ALL JSONL TENSORBOARD SWANLAB")
# How DistributedDataParallel compresses gradients on the wire.
DDPCommunicationHookType = enum.StrEnum("DDPCommunicationHookType", "NO FP16 BF16 POWER_SGD BATCHED_POWER_SGD")
# Backends of torch.compile.
DynamoBackend = enum.StrEnum("DynamoBackend", "NO EAGER AOT_EAGER INDUCTOR CUDAGRAPHS ONNXRT TENSORRT TVM")


class KwargsHandler:
    """A dataclass of keyword arguments for one torch object."""

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The attributes that differ from the defaults."""
        default = type(self)().to_dict()
        return {key: value for key, value in self.to_dict().items() if default[key] != value}


@dataclass
class AutocastKwargs(KwargsHandler):
    """For `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """For `torch.amp.GradScaler`, which fp16 needs."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """For `init_process_group`. The default backend stands for the one that fits the device.

    `timeout` is how long a collective waits for a missing rank: 10 minutes on nccl, 30 on gloo.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """For `torch.nn.parallel.DistributedDataParallel`. Communication hooks are the prepared model's to register."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share the data among the processes.

    Args:
        split_batches: a batch of the script's loader is split over the processes, so that its batch size is the
            global one; otherwise every process gets whole batches, and the global batch is that many times larger.
        dispatch_batches: True lets the main process load for all, see DataLoaderDispatcher; None and False load
            everywhere.
        even_batches: repeat samples from the start so that all processes make equally many full steps.
        use_seedable_sampler: the order is a function of seed and epoch with either value.
        data_seed: the seed of the order; by default the sampler's generator's, else `torch.initial_seed()`, of rank 0.
        non_blocking: copy to the device without waiting; pays with `pin_memory`.
        use_stateful_dataloader: prepared loaders have `state_dict` and `load_state_dict` with either value.
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
    """Where logs and checkpoints go.

    Args:
        project_dir: the folder of the project.
        logging_dir: of the trackers that write files; `project_dir` by default.
        automatic_checkpoint_naming: save to `project_dir/checkpoints/checkpoint_{iteration}`.
        total_limit: complete checkpoints to keep under automatic naming; older ones go after a new one is complete.
        iteration: the number of the next checkpoint.
        save_on_each_node: write on every machine, for folders that they do not share.
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
        """Change `project_dir`, and `logging_dir` where it has not been set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches are gathered into optimizer steps.

    Args:
        num_steps: micro-batches in a window.
        adjust_scheduler: step the scheduler in every micro-batch, as though there were no accumulation; otherwise
            only where the optimizer steps.
        sync_with_dataloader: the last batch of a loader ends its window, however short.
        sync_each_batch: average gradients over the processes in every micro-batch: less memory, more traffic.
    """

    num_steps: int | None = None
    adjust_scheduler: bool | None = None
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"a window has at least one micro-batch, not {self.num_steps}")
