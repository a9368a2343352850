"""The Accelerator: what a training script talks to.

Begin with `prepare`, `accumulate` and `backward`: they are what happens in a training loop. A window is the
micro-batches that make one optimizer step. "The original" is Hugging Face Accelerate, which uses the same names.

Checkpoints hold what stands in the lists `_models`, `_optimizers`, `_schedulers` and `_dataloaders`: the script's own
models, without the layers that `prepare` puts around them, and what `prepare` returned for the others. Two marks lie on
the objects themselves, because a library or another Accelerator has to see them:

    _is_accelerate_prepared   on each prepared object: the original's mark, by which `prepare` leaves it as it is
    _original_forward         on a model in mixed precision: the original's name for the forward without autocast
"""

import contextlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from common.launch import LAUNCHER_ACCUMULATION

from . import checkpointing, metrics, operations
from .data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches
from .environment import parse_flag_from_env
from .logging import get_logger
from .loss_scaler import LossScaler
from .optimizer import AcceleratedOptimizer
from .sampler import BatchSamplerShard, index_sampler_of
from .scheduler import AcceleratedScheduler
from .state import AcceleratorState, DistributedType, GradientState, is_initialized, reset_after_end_training
from .tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, select_trackers
from .utils import fsdp_utils, other
from .utils.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from .utils.memory import release_memory
from .utils.unwrap import extract_model_from_parallel, innermost_model, is_compiled_module
from .utils.weights import is_dtensor

logger = get_logger(__name__)

# Variables by which the original's launcher asks for other ways of training than data parallelism.
_OUT_OF_SCOPE_FLAGS = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
_HANDLER_KINDS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
_AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Accelerator:
    """Makes a training script for one process run on several, in mixed precision, with gradient accumulation.

    Args:
        device_placement: put models, batches and optimizer state on the device.
        split_batches: the script's batch size is the global one (see DataLoaderConfiguration).
        mixed_precision: "no", "fp16" (with a scaled loss) or "bf16", on CPU too; by default what the launcher says.
        gradient_accumulation_steps: micro-batches per optimizer step, for `accumulate`.
        cpu: stay on the CPU.
        dataloader_config: how prepared loaders share the data.
        rng_types: generators that all processes take over from rank 0 at the start of every epoch; by default those
            of the samplers.
        log_with: trackers, by name or as objects.
        project_dir, project_config: where logs and checkpoints go.
        gradient_accumulation_plugin: accumulation in detail, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: see AcceleratedScheduler.
        kwargs_handlers: settings for autocast, the loss scaler, DistributedDataParallel, the process group and the
            profiler.
        dynamo_backend, dynamo_plugin: compile prepared models; by default as an earlier Accelerator does, or with the
            backend in the variable ACCELERATE_DYNAMO_BACKEND.
        fsdp_plugin: share prepared models out to the processes, instead of copying them; by default what the launcher
            says.
        deepspeed_plugin, torch_tp_plugin, megatron_lm_plugin, deepspeed_plugins, parallelism_config: out of scope; only
            an empty setting passes.

    Attributes:
        sync_gradients: true in the micro-batch that ends its window: optimizers and schedulers step.
        state: the AcceleratorState: which process this is, on which device.
        gradient_state: the GradientState: where the run stands in the accumulation window and in its loaders.
        scaler: the LossScaler of an fp16 run; None in other runs, and where GradScalerKwargs say `enabled=False`.

    Raises:
        NotImplementedError: for DeepSpeed, Megatron, tensor parallelism and other kinds of handlers.
        TypeError: for an `fsdp_plugin` of another class.
        ValueError: if one thing is set twice, or a setting differs from that of an earlier Accelerator in this process.
    """

    # Programs read these to learn that DeepSpeed and model parallelism are not in use.
    deepspeed_plugin = None
    parallelism_config = None
    torch_device_mesh = None

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        out_of_scope = (deepspeed_plugin, deepspeed_plugins, torch_tp_plugin, megatron_lm_plugin, parallelism_config)
        if any(out_of_scope) or any(map(parse_flag_from_env, _OUT_OF_SCOPE_FLAGS)):
            raise NotImplementedError("DeepSpeed, Megatron and model parallelism are out of scope")
        handlers = _handlers_by_kind(kwargs_handlers or [])
        self.autocast_handler = handlers.get(AutocastKwargs)
        self.ddp_handler = handlers.get(DistributedDataParallelKwargs)
        self.scaler_handler = handlers.get(GradScalerKwargs)
        self.init_handler = handlers.get(InitProcessGroupKwargs)
        self.profile_handler = handlers.get(ProfileKwargs)
        accumulation = _choose_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)

        # The states of the process, which all Accelerators share. The first of them joins the process group here.
        reset_after_end_training()
        self.state = AcceleratorState(
            mixed_precision,
            cpu,
            dynamo_plugin=_choose_compiler(dynamo_backend, dynamo_plugin),
            fsdp_plugin=_choose_sharding(fsdp_plugin),
            _from_accelerator=True,
            **_kwargs_of(self.init_handler),
        )
        self.gradient_state = GradientState(accumulation)

        # The settings that this Accelerator alone has.
        self.project_configuration = project_config or ProjectConfiguration(project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config = replace(self.dataloader_config, split_batches=split_batches)
        self.device_placement = device_placement
        self.rng_types = ["generator"] if rng_types is None else rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.log_with = select_trackers(log_with, self.logging_dir)
        # Scripts read this, and turn autocast off by setting it to False.
        self.native_amp = self.mixed_precision != "no"

        # The rest changes during the training.
        self.scaler: LossScaler | None = None
        if self.mixed_precision == "fp16" and (self.scaler_handler is None or self.scaler_handler.enabled):
            self.scaler = LossScaler(self.device.type, **_kwargs_of(self.scaler_handler))
        # The calls of `accumulate` are counted here. A window closes at every multiple of its micro-batches, and at a
        # loader's end, where the count begins again at 0.
        self.step = 0
        self.trackers: list[GeneralTracker] = []
        self._has_raised_flag = False
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoader] = []
        self._custom_objects: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, Callable] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable] = OrderedDict()

    # Preparing, and forgetting what was prepared

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """The objects of `args`, in order: models, optimizers, loaders and schedulers prepared, others as they are.

        Args:
            device_placement: for each object, whether to put it on the device; by default as the Accelerator does.

        Raises:
            ValueError: if `device_placement` is not as long as `args`.
        """
        placements: Sequence[bool | None] = [None] * len(args) if device_placement is None else device_placement
        if len(placements) != len(args):
            raise ValueError(
                f"`device_placement` should be a list with {len(args)} elements (the number of objects passed)."
            )
        prepared = [self._prepare_one(obj, placed) for obj, placed in zip(args, placements, strict=True)]
        # Schedulers come last: each looks for its optimizer among the prepared ones.
        for index, obj in enumerate(prepared):
            if isinstance(obj, LRScheduler):
                prepared[index] = self.prepare_scheduler(obj)
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def _prepare_one(self, obj: Any, device_placement: bool | None) -> Any:
        if isinstance(obj, DataLoader):
            return self.prepare_data_loader(obj, device_placement)
        if isinstance(obj, torch.nn.Module):
            return self.prepare_model(obj, device_placement)
        if isinstance(obj, torch.optim.Optimizer):
            return self.prepare_optimizer(obj, device_placement)
        return obj

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable | None = None,
    ) -> DataLoaderShard:
        """This process's part of `data_loader`: `data_loader.prepare_data_loader` with the settings of the run."""
        if _is_prepared(data_loader) or isinstance(data_loader, DataLoaderShard):
            return _register(data_loader, self._dataloaders)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            put_on_device=self._should_place(device_placement),
            rng_types=self.rng_types.copy(),
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            **asdict(self.dataloader_config),
        )
        prepared._is_accelerate_prepared = True
        return _register(prepared, self._dataloaders)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """`model` on the device, with autocast in its forward, in DDP on several processes, and compiled if asked.

        In mixed precision its outputs in half precision come back in float32. With `evaluation_mode`, or without a
        parameter to train, DDP is left out; with `evaluation_mode` FSDP too. FSDP places a model by itself.
        """
        if _is_prepared(model):
            # Another Accelerator has prepared it, or this one has before `free_memory`. It is only registered, so that
            # checkpoints hold it. They are made of the script's own model, so the wrapper is not registered.
            own = innermost_model(model)
            if not any(innermost_model(known) is own for known in self._models):
                self._models.append(own)
            return model
        self._models.append(model)  # the script's own: the layers below are not registered
        # The layers go from the inside to the outside: the precision of the forward, the device, DDP, the compiler.
        if self.native_amp:
            self._run_forward_in_mixed_precision(model)
        if self.is_fsdp2 and not evaluation_mode:
            # This places the model too. It does so piece by piece, because the whole model may not fit on the device.
            fsdp_utils.shard_model(innermost_model(model), self.state.fsdp_plugin, self.device)
            for optimizer in self._optimizers:
                fsdp_utils.use_sharded_parameters(optimizer.optimizer)
        elif self._should_place(device_placement):
            model = model.to(self.device)
        if self._trains_in_ddp(model) and not evaluation_mode:
            model = self._wrap_in_ddp(model)
        compiler = self.state.dynamo_plugin
        if compiler.backend != DynamoBackend.NO and not is_compiled_module(model):
            model = torch.compile(model, **compiler.to_kwargs())  # type: ignore[assignment]  # a module is returned
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def _run_forward_in_mixed_precision(self, model: Any) -> None:
        model._original_forward = model.forward
        autocast: Any = self._autocast(self.autocast_handler)
        if isinstance(model.forward, MethodType):
            # It is a method of the model again, so that a deep copy of the model runs its own forward.
            function = operations.convert_outputs_to_fp32(autocast(model.forward.__func__))
            model.forward = MethodType(function, model)
        else:
            model.forward = operations.convert_outputs_to_fp32(autocast(model.forward))

    def _trains_in_ddp(self, model: torch.nn.Module) -> bool:
        """True if there is something to train, on several processes or, as in the original, in a CPU's group of one."""
        is_on_cpu = self.distributed_type == DistributedType.MULTI_CPU
        is_on_gpus = self.distributed_type == DistributedType.MULTI_GPU and self.num_processes > 1
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        return (is_on_cpu or is_on_gpus) and is_trained

    def _wrap_in_ddp(self, model: torch.nn.Module) -> DistributedDataParallel:
        device_ids = None if self.device.type == "cpu" else [self.device.index]
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **_kwargs_of(self.ddp_handler))
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        return wrapped

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """A wrapper of `optimizer` that steps only where a window ends; under fp16 through the loss scaler."""
        prepared: Any = optimizer
        if not _is_prepared(optimizer):
            fsdp_utils.use_sharded_parameters(optimizer)
            prepared = AcceleratedOptimizer(optimizer, self._should_place(device_placement), self.scaler)
            prepared._is_accelerate_prepared = True
        return _register(prepared, self._optimizers)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A wrapper of `scheduler` that steps with its optimizer; if it has none here, with all prepared ones."""
        if not _is_prepared(scheduler):
            its_optimizer = getattr(scheduler, "optimizer", None)
            found = [prepared for prepared in self._optimizers if its_optimizer in (prepared, prepared.optimizer)]
            optimizers: Any = found or self._optimizers
            scheduler = AcceleratedScheduler(
                scheduler, optimizers, self.step_scheduler_with_optimizer, self.dataloader_config.split_batches
            )
            scheduler._is_accelerate_prepared = True
        return _register(scheduler, self._schedulers)

    def _should_place(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all that was prepared; returns a None for each of `objects`, to be assigned to their names."""
        self._schedulers = []
        self._optimizers = []
        self._models = []
        self._dataloaders = []
        self.step = 0
        return release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """`free_memory` by another name."""
        return self.free_memory(*objects)

    def forget_loader(self, prepared: DataLoader) -> None:
        """Leave a prepared loader out of checkpoints."""
        self._dataloaders = [loader for loader in self._dataloaders if loader is not prepared]

    def forget_model(self, model: torch.nn.Module) -> None:
        """Undo `prepare_model`: the script's own `model` can be prepared anew, for instance in another precision.

        It has its own forward again, and is in no checkpoint. Wrappers around it stay, and shards of FSDP too.
        """
        own = innermost_model(model)
        self._models = [known for known in self._models if innermost_model(known) is not own]
        self.unwrap_model(own, keep_fp32_wrapper=False)
        vars(own).pop("_is_accelerate_prepared", None)

    # Micro-batches and their windows

    @contextlib.contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Count a micro-batch: `with accelerator.accumulate(model):` around its forward, backward and optimizer step.

        In every `gradient_accumulation_steps`-th micro-batch, and in a loader's last one unless `sync_with_dataloader`
        is off, `sync_gradients` is true: gradients are averaged over the processes, and optimizer and scheduler step.
        In the others their calls do nothing, and the gradients of `models` stay local, unless `sync_each_batch` is on.
        Those of a model that is not named here are averaged in every micro-batch.
        """
        state = self.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        if state.sync_gradients or not self.state.use_distributed or state.sync_each_batch:
            yield
            return
        with contextlib.ExitStack() as unsynced:
            for model in models:
                unsynced.enter_context(self.no_sync(model))
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)` for this micro-batch's part of its window, scaled under fp16.

        While it runs, DistributedDataParallel, into which `prepare_model` puts a model, replaces each gradient by its
        mean over the processes; not under `no_sync`.

        The loss is divided by `gradient_accumulation_steps`, also in a window that the end of the loader cuts short.
        The gradients of such a window are smaller than those of a whole one.
        """
        num_steps = self.gradient_state.num_steps
        if num_steps > 1:
            loss = loss / num_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which gradients of `model` stay on their process."""
        stay_local: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.state.use_distributed and self.is_fsdp2:
            stay_local = fsdp_utils.no_sync(innermost_model(model))
        elif self.state.use_distributed and hasattr(model, "no_sync"):
            stay_local = model.no_sync()  # type: ignore[operator]  # a method, not a parameter
        with stay_local:
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
        """Average gradients in a backward whose forward ran under `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        backward_before = model.require_backward_grad_sync
        forward_before = model.require_forward_param_sync
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync = backward_before
            model.require_forward_param_sync = forward_before

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list, even_batches: bool | None = None) -> Iterator[None]:
        """Train on uneven inputs: a process without batches still takes part in the collectives of the others.

        A sharded model cannot be joined: under FSDP this warns and changes nothing, as in the original.

        Args:
            joinables: models prepared for several processes. What has no `join_hook` is left out.
            even_batches: for the prepared loaders of map-style datasets within the block, instead of what they were
                prepared with.
        """
        if self.is_fsdp2:
            warnings.warn("`join_uneven_inputs` has no effect under FSDP", stacklevel=3)
        if self.is_fsdp2 or self.distributed_type == DistributedType.NO:
            yield
            return
        is_over_streams = any(isinstance(loader.dataset, IterableDataset) for loader in self._dataloaders)
        if even_batches is not None and is_over_streams:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were"
                " iterable",
                stacklevel=3,
            )
        are_even = self.even_batches if even_batches is None else even_batches
        to_join = [joinable for joinable in joinables if hasattr(joinable, "join_hook")]
        joined: contextlib.AbstractContextManager = contextlib.nullcontext()
        if to_join and not are_even:
            joined = Join(to_join, throw_on_early_termination=False)
        with self._override_even_batches(even_batches), joined:
            yield

    @contextlib.contextmanager
    def _override_even_batches(self, even_batches: bool | None) -> Iterator[None]:
        """Within the block the prepared loaders of map-style datasets have this setting; None leaves each its own."""
        shards = [shard for shard in map(index_sampler_of, self._dataloaders) if isinstance(shard, BatchSamplerShard)]
        even_before = [shard.even_batches for shard in shards]
        if even_batches is not None:
            for shard in shards:
                shard.even_batches = even_batches
        try:
            yield
        finally:
            for shard, was_even in zip(shards, even_before, strict=True):
                shard.even_batches = was_even

    # Gradients

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale the gradients to a norm of at most `max_norm`.

        Call it where `sync_gradients` is true, as the example of the original does. In the middle of a window it scales
        the gradients too, except under fp16: there they keep the scale of the loss until the window ends.

        Returns:
            The norm before clipping, without the scale of the loss.
        """
        parameters = _as_list(parameters)
        if self.scaler is not None and not self.sync_gradients:
            # The gradients stay scaled, because later micro-batches add scaled gradients to them.
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            return torch.nn.utils.get_total_norm(gradients, norm_type) / self.scaler.get_scale()
        self._unscale_gradients_of(parameters)
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if is_dtensor(norm) else norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut the gradients to [-clip_value, clip_value]; under fp16 only where a window ends."""
        parameters = _as_list(parameters)
        if self.scaler is None or self.sync_gradients:
            self._unscale_gradients_of(parameters)
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def _unscale_gradients_of(self, parameters: list[torch.Tensor]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers:
            if any(id(parameter) in wanted for parameter in optimizer.parameters()):
                optimizer.unscale()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the scale of the loss off the gradients of an optimizer, a list of them, or all (fp16)."""
        wanted = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for prepared in self._optimizers:
            if optimizer is None or prepared in wanted or prepared.optimizer in wanted:
                prepared.unscale()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if a gradient that is not finite made an optimizer skip its last step (fp16)."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # Mixed precision, models and profiling

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """A context with the run's mixed precision; prepared models enter it by themselves in their forward."""
        with self._autocast(autocast_handler or self.autocast_handler):
            yield

    def _autocast(self, handler: AutocastKwargs | None) -> contextlib.AbstractContextManager:
        if not self.native_amp:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, _AUTOCAST_DTYPES[self.mixed_precision], **_kwargs_of(handler))

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The script's own model inside `model`, see `utils.extract_model_from_parallel`."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The state dict of `model`: without DDP's prefix unless `unwrap` is off, but with that of `torch.compile`.

        Of a sharded model, all processes must call it. The main process of each machine gets the whole weights, on the
        CPU, and the buffers as they are; the others get an empty dict.
        """
        if unwrap:
            model = self.unwrap_model(model)
        if self.is_fsdp2:
            return fsdp_utils.whole_state_dict(model, is_needed=self.is_local_main_process)
        return model.state_dict()

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Profile the block, and write the trace of every process if the handler has an `output_trace_dir`.

        Args:
            profile_handler: instead of the one among `kwargs_handlers`.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is None:
            return
        os.makedirs(handler.output_trace_dir, exist_ok=True)
        trace = os.path.join(handler.output_trace_dir, f"profile_{self.process_index}.json")
        profiler.export_chrome_trace(trace)
        self.wait_for_everyone()

    # Collectives

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all processes, joined in rank order: `operations.gather`."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """All processes' results for the batch at hand, each real sample once: `metrics.gather_for_metrics`.

        The loader knows by a `sampler.ShortStep` which samples of the step are real. The others are cut off.
        """
        return metrics.gather_for_metrics(input_data, self.gradient_state.active_dataloader, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Nested tensors, added up over all processes or combined by another `reduction`: `operations.reduce`."""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Nested tensors, as long along `dim` as the longest of all: `operations.pad_across_processes`."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Return when every process has called this."""
        self.state.wait_for_everyone()

    def set_trigger(self) -> None:
        """Raise this process's flag for `check_trigger`."""
        self._has_raised_flag = True

    def check_trigger(self) -> bool:
        """True if any process raised its flag; all flags are then taken down. A collective."""
        flags_raised = self.reduce(torch.tensor(float(self._has_raised_flag), device=self.device))
        self._has_raised_flag = False
        return flags_raised.item() > 0

    # Checkpoints

    def save_state(
        self,
        output_dir: str | os.PathLike | None = None,
        safe_serialization: bool = True,
        all_ranks: bool = False,
        with_optimizers: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Write everything that the run needs to go on: `checkpointing.save_state`.

        It waits for nobody by default. Under FSDP all processes must call it. `save_model_func_kwargs` change nothing.
        Without `with_optimizers` a checkpoint has no optimizers, schedulers and scaler. (The original has no such one.)
        """
        run = self._run_state()
        if not with_optimizers:
            run = replace(run, optimizers=[], schedulers=[], scaler=None)
        return checkpointing.save_state(run, output_dir, safe_serialization, all_ranks)

    def load_state(
        self,
        input_dir: str | os.PathLike | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        with_loaders: bool = True,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Put the run where `save_state` left it: `checkpointing.load_state`. A collective.

        Without `with_loaders` the loaders stay where they are. (The original does not have this argument.)
        """
        run = self._run_state()
        self.step = checkpointing.load_state(run, input_dir, load_kwargs, with_loaders, **load_model_func_kwargs)

    def _run_state(self) -> checkpointing.RunState:
        return checkpointing.RunState(
            project=self.project_configuration,
            models=self._models,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            scaler=self.scaler,
            custom_objects=self._custom_objects,
            save_hooks=list(self._save_model_state_pre_hook.values()),
            load_hooks=list(self._load_model_state_pre_hook.values()),
            step=self.step,
            get_state_dict=self.get_state_dict,
        )

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write `obj` to `f` from one process, or one of every machine: `utils.other.save`."""
        other.save(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of `model` to `save_directory`, in one file that is whole or not there.

        Args:
            max_shard_size: has no effect; the weights come in one file.
            safe_serialization: write model.safetensors; otherwise pytorch_model.bin.

        Raises:
            RuntimeError: if a parameter is on the meta device.
        """
        if any(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeError("You can't save the model since some parameters are on the meta device.")
        if max_shard_size != "10GB":
            logger.warning("max_shard_size=%r has no effect: the weights come in one file", max_shard_size)
        state_dict = self.get_state_dict(model)
        os.makedirs(save_directory, exist_ok=True)
        name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
        self.save(state_dict, os.path.join(save_directory, name), safe_serialization)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
        """A loader without the first `num_batches` batches: `data_loader.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make `save_state` and `load_state` keep `objects`, through their `state_dict` and `load_state_dict`.

        Raises:
            ValueError: if an object lacks one of the two; it names all such objects.
        """
        invalid = []
        for index, obj in enumerate(objects):
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                invalid.append(f"Item at index {index}: {obj}")
        if invalid:
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The following"
                f" inputs are invalid: {'; '.join(invalid)}"
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[[list, list, str], None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before the weights that it leaves in the list are saved."""
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[[list, str], None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before weights are loaded, into the models that it leaves in the list."""
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    # Trackers

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, dict] | None = None
    ) -> None:
        """Start the trackers of `log_with` on the main process, each with its own `init_kwargs[name]`."""
        if not self.is_main_process:
            return
        init_kwargs = init_kwargs or {}
        for wanted in self.log_with:
            tracker = wanted
            if isinstance(wanted, str):
                kwargs = init_kwargs.get(wanted, {})
                tracker = LOGGER_TYPE_TO_CLASS[wanted](project_name, self.logging_dir, **kwargs)
            if hasattr(tracker, "start"):  # A tracker of the script's own need not have this method.
                tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)
            self.trackers.append(tracker)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker `name`, or with `unwrap` its library's own run; one that does nothing, if no tracker was started.

        Raises:
            ValueError: if other trackers were started, but not this one.
        """
        if not self.trackers:
            return GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]  # subclasses have it
        raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict] | None = None) -> None:
        """Log `values` with every tracker, each with its own `log_kwargs[name]`."""
        log_kwargs = log_kwargs or {}
        for tracker in self.trackers:
            tracker.log(values, step=step, **log_kwargs.get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish the trackers and leave the process group; a new Accelerator starts afresh."""
        try:
            for tracker in self.trackers:
                tracker.finish()
        finally:
            self.state.destroy_process_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Accelerator":
        """The Accelerator itself: there is one run."""
        return self

    # The rest of this class only forwards to the GradientState, the AcceleratorState and the two configurations.

    @property
    def sync_gradients(self) -> bool:
        """True if this micro-batch ends its window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a window."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """NO, MULTI_CPU, MULTI_GPU or FSDP."""
        return self.state.distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """True where prepared models are sharded."""
        return self.state.is_fsdp2

    @property
    def use_distributed(self) -> bool:
        """True if there are several processes."""
        return self.state.use_distributed

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The local rank: among the processes of this machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """True on rank 0 only: one process of the whole run."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0: one process per machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True on the last rank only."""
        return self.state.is_last_process

    @property
    def mixed_precision(self) -> str:
        """The numbers in which the forward computes: "no" (float32), "fp16" or "bf16"."""
        return self.state.mixed_precision

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called on rank 0 and returning None elsewhere."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called on local rank 0 of every machine and returning None elsewhere."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called on the last rank and returning None elsewhere."""
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """`function`, called on rank `process_index` and in a single process, and returning None elsewhere."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """`function`, called on this local rank of every machine and in a single process, and None elsewhere."""
        return self.state.on_local_process(function, local_process_index)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Rank 0 runs the block before all others do."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Local rank 0 runs the block before the others of its machine do."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """This process's contiguous share of `inputs`, see `PartialState.split_between_processes`."""
        return self.state.split_between_processes(inputs, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once per machine."""
        self.state.print(*args, **kwargs)

    @property
    def even_batches(self) -> bool:
        """`even_batches` of the loaders that are prepared from now on: see DataLoaderConfiguration."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def split_batches(self) -> bool:
        return self.dataloader_config.split_batches

    @property
    def non_blocking(self) -> bool:
        return self.dataloader_config.non_blocking

    @property
    def use_seedable_sampler(self) -> bool:
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        return self.dataloader_config.use_stateful_dataloader

    @property
    def multi_device(self) -> bool:
        """True for several processes with a GPU each."""
        return self.use_distributed and self.distributed_type == DistributedType.MULTI_GPU

    @property
    def dispatch_batches(self) -> bool | None:
        return self.dataloader_config.dispatch_batches

    @property
    def project_dir(self) -> str | os.PathLike | None:
        return self.project_configuration.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint under automatic naming."""
        return self.project_configuration.iteration

    @property
    def logging_dir(self) -> str | os.PathLike | None:
        """The folder of the trackers that write files."""
        return self.project_configuration.logging_dir


def _choose_accumulation(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """The accumulation that the launcher, or else the script, asks for; a plugin of the script wins over both."""
    if plugin is None:
        num_steps = os.environ.get(LAUNCHER_ACCUMULATION, steps)
        return GradientAccumulationPlugin(num_steps=int(num_steps))
    if steps != 1:
        raise ValueError("You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`.")
    return plugin


def _choose_sharding(plugin: FullyShardedDataParallelPlugin | None) -> FullyShardedDataParallelPlugin | None:
    """The plugin of the script, or else the launcher's for the first Accelerator; None keeps that of an earlier one."""
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_FSDP") and not is_initialized():
        return FullyShardedDataParallelPlugin()
    if not isinstance(plugin, FullyShardedDataParallelPlugin | None):
        raise TypeError("`fsdp_plugin` must be a FullyShardedDataParallelPlugin object.")
    return plugin


def _choose_compiler(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin | None:
    """The compiler that the script or the environment asks for; None to keep that of an earlier Accelerator."""
    if plugin is not None and backend is not None:
        raise ValueError("You cannot pass in both `dynamo_plugin` and `dynamo_backend`, please only pass in one.")
    if plugin is not None:
        return plugin
    if backend is None and is_initialized():
        return None
    return TorchDynamoPlugin(backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND"))


def _handlers_by_kind(handlers: list[KwargsHandler]) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for handler in handlers:
        kind = type(handler)
        if not isinstance(handler, KwargsHandler):
            raise AssertionError(
                f"Unsupported kwargs handler passed: {handler}, must be one that inherits KwargsHandler"
            )
        if kind not in _HANDLER_KINDS:
            raise NotImplementedError(f"{kind.__name__} is out of scope: no kwargs handler of this core")
        if kind in found:
            raise ValueError(f"You can only pass one {kind} in `kwargs_handlers`.")
        found[kind] = handler
    return found


def _kwargs_of(handler: KwargsHandler | None) -> dict[str, Any]:
    """The keyword arguments that the script has given for some object of torch: none without a handler."""
    return {} if handler is None else handler.to_kwargs()


def _is_prepared(obj: Any) -> bool:
    return getattr(obj, "_is_accelerate_prepared", False)


def _register(prepared: Any, registered: list) -> Any:
    """Add `prepared` to the list `registered`, unless it is there already, and return it."""
    if not any(prepared is known for known in registered):
        registered.append(prepared)
    return prepared


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
