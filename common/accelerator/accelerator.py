"""The Accelerator: what a training script talks to."""

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch.distributed.algorithms import Join
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from . import checkpointing, operations
from .data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches
from .optimizer import AcceleratedOptimizer, LossScaler, linked
from .scheduler import AcceleratedScheduler
from .state import AcceleratorState, GradientState, PartialState, parse_flag_from_env
from .tracking import GeneralTracker, select_trackers
from .utils import dataclasses as settings
from .utils.memory import release_memory

_OUT_OF_SCOPE = (
    "deepspeed_plugin deepspeed_plugins fsdp_plugin torch_tp_plugin megatron_lm_plugin parallelism_config dynamo_plugin"
)
_NO_CONTEXT = contextlib.nullcontext()


class Accelerator:
    """Makes a training script for one process run on several, in mixed precision, with gradient accumulation.

    Args:
        device_placement: put models, batches and optimizer state on the device.
        split_batches: the script's batch size is the global one (see DataLoaderConfiguration).
        mixed_precision: "no", "fp16" (with a scaled loss) or "bf16", on CPU too; by default what the launcher says.
        gradient_accumulation_steps: micro-batches per optimizer step, for `accumulate`.
        cpu: stay on the CPU.
        dataloader_config: how prepared loaders share the data.
        rng_types: generators that all processes take over from rank 0 at the start of every epoch.
        log_with: trackers, by name or as objects.
        project_dir, project_config: where logs and checkpoints go.
        gradient_accumulation_plugin: accumulation in detail, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: see AcceleratedScheduler.
        kwargs_handlers: settings for autocast, the loss scaler, DistributedDataParallel and the process group.
        dynamo_backend: compile prepared models with it; by default what the launcher says.

    Attributes:
        sync_gradients: whether this micro-batch ends its window, so that optimizers and schedulers step.
        state: an AcceleratorState. What it has, the Accelerator has too: device, num_processes, process_index,
            is_main_process, on_main_process, main_process_first, split_between_processes, wait_for_everyone, print, …
        project_configuration, dataloader_config: likewise: project_dir, logging_dir, split_batches, even_batches, …

    Raises:
        NotImplementedError: for DeepSpeed, FSDP, Megatron, tensor parallelism and other handlers.
        ValueError: for two settings of one thing, and what differs from an earlier Accelerator of the process.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: settings.DataLoaderConfiguration | None = None,
        *,
        rng_types: list[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike | None = None,
        project_config: settings.ProjectConfiguration | None = None,
        gradient_accumulation_plugin: settings.GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list | None = None,
        dynamo_backend: str | None = None,
        **out_of_scope,
    ) -> None:
        for name in out_of_scope.keys() - set(_OUT_OF_SCOPE.split()):
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        flags = [f"ACCELERATE_USE_{kind}" for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")]
        for name in (*filter(out_of_scope.get, out_of_scope), *filter(parse_flag_from_env, flags)):
            raise NotImplementedError(f"{name} is out of scope: this core trains with data parallelism")
        if gradient_accumulation_plugin is not None and gradient_accumulation_steps != 1:
            raise ValueError("pass either gradient_accumulation_steps or gradient_accumulation_plugin")
        handlers = {type(handler): handler for handler in kwargs_handlers or ()}
        if len(handlers) < len(kwargs_handlers or ()):
            raise ValueError("You can only pass one of each kind in `kwargs_handlers`.")
        kinds = settings.AutocastKwargs, settings.GradScalerKwargs
        self.autocast_handler, self.scaler_handler = (handlers.pop(kind, None) or kind() for kind in kinds)
        kinds = settings.DistributedDataParallelKwargs, settings.InitProcessGroupKwargs
        self.ddp_handler, self.init_handler = (handlers.pop(kind, None) or kind() for kind in kinds)
        if handlers:
            raise NotImplementedError(f"no kwargs handlers of this core: {', '.join(map(str, handlers))}")
        if PartialState._shared_state.get("ended"):
            PartialState._reset_state()
            GradientState._reset_state()
        steps = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps))
        self.gradient_state = GradientState(gradient_accumulation_plugin or settings.GradientAccumulationPlugin(steps))
        self.state = AcceleratorState(mixed_precision, cpu, **self.init_handler.to_kwargs())
        self.project_configuration = project_config or settings.ProjectConfiguration(project_dir)
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.dataloader_config = dataloader_config or settings.DataLoaderConfiguration()
        if split_batches is not None:
            self.dataloader_config = replace(self.dataloader_config, split_batches=split_batches)
        self.device_placement, self.rng_types = device_placement, rng_types or []
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dynamo_backend = str(dynamo_backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower()
        self.trackers, self.log_with = [], select_trackers(log_with, self.project_configuration.logging_dir)
        fp16 = self.state.mixed_precision == "fp16"
        self.scaler = LossScaler(self.state.device.type, **self.scaler_handler.to_kwargs()) if fp16 else None
        # Micro-batches since a loader's end last closed a window, and how many the one has that is being closed so.
        self.step, self._short_window = 0, 0
        self._loss_was_divided = False
        self.flag_tensor = None
        self._save_model_state_pre_hook, self._load_model_state_pre_hook = OrderedDict(), OrderedDict()
        self._models, self._optimizers, self._schedulers, self._dataloaders = [], [], [], []
        self._custom_objects = []

    def __getattr__(self, name: str) -> Any:
        for part in ("state", "dataloader_config", "project_configuration"):
            if part in vars(self) and hasattr(vars(self)[part], name):
                return getattr(vars(self)[part], name)
        raise AttributeError(f"'Accelerator' object has no attribute {name!r}")

    save_iteration = linked("project_configuration", "iteration")
    even_batches = linked("dataloader_config", "even_batches")
    sync_gradients = linked("gradient_state", "sync_gradients")
    gradient_accumulation_steps = linked("gradient_state", "num_steps")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a gradient that is not finite made an optimizer skip its last step (fp16)."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def prepare(self, *args, device_placement: list[bool] | None = None) -> Any:
        """The objects of `args`, in order: models, optimizers, loaders and schedulers prepared, others as they are.

        Args:
            device_placement: for each object, whether to put it on the device; by default as the Accelerator does.

        Raises:
            ValueError: if `device_placement` is not as long as `args`.
        """
        placement = [None] * len(args) if device_placement is None else device_placement
        if len(placement) != len(args):
            raise ValueError(f"`device_placement` has {len(placement)} entries for {len(args)} objects")
        # Schedulers last: each looks for its optimizer among the prepared ones.
        kinds = [DataLoader, torch.nn.Module, torch.optim.Optimizer, LRScheduler]
        ways = [self.prepare_data_loader, self.prepare_model, self.prepare_optimizer, self.prepare_scheduler]
        prepared = list(args)
        for kind, prepare in zip(kinds, ways, strict=True):
            for index, (obj, place) in enumerate(zip(args, placement, strict=True)):
                if isinstance(obj, kind):
                    prepared[index] = prepare(obj, place)
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def _places(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    @staticmethod
    def _keep(prepared: Any, among: list) -> Any:
        if not any(prepared is other for other in among):
            among.append(prepared)
        return prepared

    def prepare_model(self, model, device_placement=None, evaluation_mode=False) -> torch.nn.Module:
        """`model` on the device, with autocast in its forward, compiled if asked, and in DDP on several processes.

        Its outputs come back in float32. With `evaluation_mode`, or without a parameter to train, DDP is left out.
        """
        if getattr(model, "_is_accelerate_prepared", False):
            return self._keep(model, self._models)
        if self._places(device_placement):
            model = model.to(self.device)
        if self.mixed_precision != "no":
            forward = getattr(model.forward, "__func__", model.forward)
            mixed = operations.convert_outputs_to_fp32(self.autocast()(forward))
            model._original_forward = model.forward
            # Bound, so that a deep copy of the model runs the copy's forward.
            model.forward = mixed if forward is model.forward else MethodType(mixed, model)
        if self.dynamo_backend != "no":
            model.compile(backend=self.dynamo_backend)
        if self.use_distributed and not evaluation_mode and any(p.requires_grad for p in model.parameters()):
            devices = None if self.device.type == "cpu" else [self.device.index]
            model = DistributedDataParallel(model, device_ids=devices, **self.ddp_handler.to_kwargs())
        model._is_accelerate_prepared = True
        return self._keep(model, self._models)

    def prepare_optimizer(self, optimizer, device_placement=None) -> AcceleratedOptimizer:
        """`optimizer`, stepping where a window ends and through the loss scaler under fp16."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = AcceleratedOptimizer(optimizer, self._places(device_placement), self.scaler)
        return self._keep(optimizer, self._optimizers)

    def prepare_scheduler(self, scheduler, _=None) -> AcceleratedScheduler:
        """`scheduler`, stepping with its optimizer; with all prepared ones if it belongs to none of them."""
        if not isinstance(scheduler, AcceleratedScheduler):
            own = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) in (o, o.optimizer)]
            own = own or self._optimizers
            scheduler = AcceleratedScheduler(scheduler, own, self.step_scheduler_with_optimizer, self.split_batches)
        return self._keep(scheduler, self._schedulers)

    def prepare_data_loader(self, data_loader, device_placement=None, slice_fn_for_dispatch=None) -> DataLoaderShard:
        """This process's part of `data_loader`: `data_loader.prepare_data_loader` with the settings of the run."""
        if not isinstance(data_loader, DataLoaderShard):
            how = vars(self.dataloader_config) | {"slice_fn_for_dispatch": slice_fn_for_dispatch}
            how |= {"put_on_device": self._places(device_placement), "rng_types": self.rng_types}
            data_loader = prepare_data_loader(data_loader, self.device, self.num_processes, self.process_index, **how)
        return self._keep(data_loader, self._dataloaders)

    def accumulate(self, *models: torch.nn.Module) -> contextlib.AbstractContextManager:
        """Count a micro-batch: `with accelerator.accumulate(model):` around its forward, backward and optimizer step.

        In every `gradient_accumulation_steps`-th micro-batch, and in the last one of the loader, `sync_gradients` is
        true: gradients are averaged over the processes, and optimizer and scheduler step. In the others their calls do
        nothing. Every micro-batch weighs the same in its window, however many samples it has.
        """
        state = self.gradient_state
        self._short_window = 0
        if state.sync_with_dataloader and state.end_of_dataloader:
            in_window = self.step % state.num_steps + 1
            if in_window < state.num_steps:
                self._shorten_window(in_window)
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        if state.sync_gradients or state.sync_each_batch or not self.use_distributed:
            return _NO_CONTEXT
        unsynced = contextlib.ExitStack()
        for model in models:
            unsynced.enter_context(self.no_sync(model))
        return unsynced

    def _shorten_window(self, micro_batches: int) -> None:
        # Those before this one were divided by the size of a whole window, when its end was not in sight.
        self._short_window = micro_batches
        if micro_batches > 1 and self._loss_was_divided:
            for parameter in (p for optimizer in self._optimizers for p in optimizer.parameters()):
                if parameter.grad is not None:
                    parameter.grad.mul_(self.gradient_state.num_steps / micro_batches)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager:
        """A context in which gradients of `model` stay on their process."""
        return model.no_sync() if hasattr(model, "no_sync") else _NO_CONTEXT

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
        """Average gradients in a backward whose forward ran under `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def backward(self, loss: torch.Tensor, **kwargs) -> None:
        """`loss.backward(**kwargs)` for this micro-batch's part of its window, scaled under fp16."""
        micro_batches = self._short_window or self.gradient_state.num_steps
        if micro_batches > 1:
            loss = loss / micro_batches
        self._loss_was_divided = self.gradient_state.num_steps > 1
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)

    def autocast(self, autocast_handler: settings.AutocastKwargs | None = None) -> contextlib.AbstractContextManager:
        """A context with the run's mixed precision; prepared models enter it by themselves in their forward."""
        if self.mixed_precision == "no":
            return _NO_CONTEXT
        dtype = torch.float16 if self.mixed_precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, **vars(autocast_handler or self.autocast_handler))

    def unscale_gradients(self, optimizer=None) -> None:
        """Divide the scale of the loss (fp16) out of the gradients of `optimizer`, one, several, or all prepared."""
        chosen = self._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            each.unscale()

    def _unscaled(self, parameters) -> list[torch.Tensor]:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        chosen = set(map(id, parameters))
        for optimizer in self._optimizers if self.sync_gradients else ():
            if not chosen.isdisjoint(map(id, optimizer.parameters())):
                optimizer.unscale()
        return parameters

    def clip_grad_norm_(self, parameters, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale the gradients to a norm of at most `max_norm`; nothing before the window's end.

        Returns:
            The norm before; before the window's end that of what is there so far.
        """
        limit = max_norm if self.sync_gradients else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._unscaled(parameters), limit, norm_type)
        return norm if self.sync_gradients or not self.scaler else norm / self.scaler.get_scale()

    def clip_grad_value_(self, parameters, clip_value: float) -> None:
        """Cut the gradients to [-clip_value, clip_value]; nothing before the window's end."""
        if self.sync_gradients:
            torch.nn.utils.clip_grad_value_(self._unscaled(parameters), clip_value)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list, even_batches: bool | None = None) -> Iterator[None]:
        """Let processes that run out of batches shadow the collectives of the others: training on uneven inputs.

        Args:
            joinables: models prepared for several processes.
            even_batches: for the prepared loaders within the block, instead of what they were prepared with.
        """
        if not self.use_distributed:
            yield
            return
        shards = [loader.shards for loader in self._dataloaders if hasattr(loader.shards, "even_batches")]
        before = [shard.even_batches for shard in shards]
        even_batches = self.even_batches if even_batches is None else even_batches
        try:
            for shard in shards:
                shard.even_batches = even_batches
            with Join(joinables, enable=not even_batches, throw_on_early_termination=False):
                yield
        finally:
            for shard, value in zip(shards, before, strict=True):
                shard.even_batches = value

    save_state, load_state = checkpointing.save_state, checkpointing.load_state
    save, save_model = checkpointing.save, checkpointing.save_model

    skip_first_batches = staticmethod(skip_first_batches)
    gather, pad_across_processes = staticmethod(operations.gather), staticmethod(operations.pad_across_processes)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What all processes computed for the batch at hand, each real sample once: `operations.gather_for_metrics`."""
        return operations.gather_for_metrics(input_data, self.gradient_state.active_dataloader, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `operations.reduce`."""
        return operations.reduce(tensor, reduction, scale)

    def set_trigger(self) -> None:
        """Raise this process's flag for `check_trigger`."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process raised its flag; takes all flags down. A collective."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = None
        return bool(operations.reduce(flag, "max"))

    def unwrap_model(self, model, keep_fp32_wrapper=True, keep_torch_compile=True) -> torch.nn.Module:
        """The script's own model inside `model`; without `keep_fp32_wrapper`, with the script's own forward too."""
        wrappers = DistributedDataParallel, DataParallel
        inner = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
        if isinstance(model, wrappers) or isinstance(inner, wrappers) or (inner is not None and not keep_torch_compile):
            return self.unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper and "_original_forward" in vars(model):
            model.forward = vars(model).pop("_original_forward")
        return model

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The state dict of `model`, with the script's own names unless `unwrap` is off."""
        return (self.unwrap_model(model, keep_torch_compile=False) if unwrap else model).state_dict()

    def free_memory(self, *objects) -> list[None]:
        """Forget all that was prepared; returns a None for each of `objects`, to be assigned to their names."""
        for prepared in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            prepared.clear()
        self.step = 0
        return release_memory(*objects)

    clear = free_memory

    def register_for_checkpointing(self, *objects) -> None:
        """Make `save_state` and `load_state` keep `objects`, by their `state_dict` and `load_state_dict`.

        Raises:
            ValueError: naming those that lack one.
        """
        unfit = [obj for obj in objects if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))]
        if unfit:
            raise ValueError(f"objects without state_dict and load_state_dict cannot be checkpointed: {unfit}")
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

    def init_trackers(self, project_name: str, config: dict | None = None, init_kwargs: dict | None = None) -> None:
        """Start the trackers of `log_with` on the main process, each with its own `init_kwargs[name]`."""
        if not self.is_main_process:
            return
        for tracker in self.log_with:
            if isinstance(tracker, type):
                place = [self.logging_dir] if tracker.requires_logging_directory else []
                tracker = tracker(project_name, *place, **(init_kwargs or {}).get(tracker.name, {}))
            self.trackers.append(tracker)
            getattr(tracker, "start", lambda: None)()
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker `name`, or with `unwrap` its library's own run; where none runs, one that does nothing.

        Raises:
            ValueError: where others run, but not this one.
        """
        if not self.trackers:
            return GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log `values` with every tracker, each with its own `log_kwargs[name]`."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        """Finish the trackers and leave the process group; a new Accelerator starts afresh."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []
        self.state.destroy_process_group()
        self.state.ended = True
