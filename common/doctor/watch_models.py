"""Observers of networks and optimizers: weights, BatchNorm's statistics, random numbers, learning rates.

They are torch's hooks for all modules and all optimizers. A network is what the script calls itself; modules within
it are a part of it.
"""

import os
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.doctor.generators import note_draws, states
from common.doctor.record import Model
from common.doctor.watch_data import DataWatch
from common.doctor.watcher import Watcher

VALUES = 512  # of a parameter, spread over it
OFTEN = 16  # up to this step weights are noted after each, then after every power of two
DRAWS = 64  # forwards before and after which the generators are looked at


class ModelWatch:
    """The networks and optimizers of a script."""

    def __init__(self, watcher: Watcher, data: DataWatch) -> None:
        self._watcher = watcher
        self._record = watcher.record
        self._data = data
        self._models: weakref.WeakKeyDictionary[nn.Module, Model] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of those networks
        self._wrapped: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple]] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._outermost: nn.Module | None = None  # the module that the script has called
        self._steps_within = 0
        self._forwards_of_step = 0
        self._generators_before: dict[str, int] | None = None  # a forward

    def install(self) -> None:
        observer = self._watcher.observer
        register_module_forward_pre_hook(observer(self._enter))
        register_module_forward_hook(observer(self._leave), always_call=True)
        register_optimizer_step_pre_hook(observer(self._before_step))
        register_optimizer_step_post_hook(observer(self._after_step))
        self._watcher.watch(DistributedDataParallel, "__init__", after=self._note_wrapping)

    def _note_wrapping(self, _: None, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self._wrapped[ddp.module] = _identities(ddp.module)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._outermost is None:
            self._outermost = module
            self._enter_network(module, args)
        model = self._models.get(module)
        if model is None:
            return
        # Here DDP has already copied rank 0's buffers, if it does.
        if not module.training:
            model.statistics.setdefault(self._record.steps, _statistics(module))
        elif self._watcher.gradients and model.forwards <= DRAWS:
            self._generators_before = states(next(module.parameters()).device)

    def _enter_network(self, outermost: nn.Module, inputs: Any) -> None:
        module, through_wrapper = _unwrapped(outermost)
        model = self._model(module)
        if model is None:
            return
        if self._record.steps:
            self._note_weights(module, model)
        if not module.training or not self._watcher.gradients:
            return
        self._forwards_of_step += 1
        model.forwards += 1
        holds_wrapper = any(isinstance(part, DistributedDataParallel) for part in module.modules())
        model.wrapped = module in self._wrapped or holds_wrapper
        self._data.note_forward(inputs)
        if model.wrapped:
            self._note_weights(module, model)
        if module in self._wrapped:
            model.bypassed += not through_wrapper
            before = self._wrapped[module]
            model.changed = [name for name, value in _identities(module).items() if before.get(name) != value]

    def _model(self, module: nn.Module) -> Model | None:
        """The model of a network, which may be new; None for a part of one, and for what has no parameters."""
        known = self._models.get(module)
        if known is not None or module in self._parts:
            return known
        parameters = list(module.parameters())
        if not parameters:
            return None
        model = Model(type(module).__name__, parameters=len(parameters))
        model.has_module = "module" in dict(module.named_children())
        self._models[module] = model
        self._parts.update(module.modules())
        self._record.models.append(model)
        return model

    def _note_weights(self, module: nn.Module, model: Model) -> None:
        steps = self._record.steps
        chosen = steps <= OFTEN or steps & (steps - 1) == 0
        if chosen and steps not in model.weights:
            model.weights[steps] = _parameters(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._outermost:
            self._outermost = None
        if module in self._models and self._generators_before is not None:
            note_draws(self._record.forward_draws, self._generators_before, next(module.parameters()).device)
            self._generators_before = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps_within += 1
        if self._record.steps:
            return
        for module, model in self._models.items():
            trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
            model.without_gradient = [name for name, p in trained.items() if p.grad is None]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self._steps_within -= 1
        if self._steps_within > 0:  # an optimizer that steps another one, as ZeroRedundancyOptimizer does
            return
        record = self._record
        record.steps += 1
        if record.steps <= OFTEN:
            self._compare_with_optimizers()
        record.rates.append([float(group["lr"]) for group in optimizer.param_groups])
        record.windows.append(self._forwards_of_step)
        self._forwards_of_step = 0
        if record.steps == self._watcher.last_step:
            self._watcher.finish("steps")
            os._exit(0)

    def _compare_with_optimizers(self) -> None:
        held = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                held.update({id(parameter): parameter for parameter in group["params"]})
        known = set()
        forgotten = []
        for module, model in self._models.items():
            for name, parameter in module.named_parameters():
                known.add(id(parameter))
                if model.forwards and parameter.grad is not None and id(parameter) not in held:
                    forgotten.append(name)
        self._record.forgotten = forgotten
        self._record.orphans = sum(p.grad is None for key, p in held.items() if key not in known)


def _unwrapped(module: nn.Module) -> tuple[nn.Module, bool]:
    """The network in its wrappers, and whether DDP is one of them."""
    through = False
    while True:
        through = through or isinstance(module, DistributedDataParallel)
        inner = getattr(module, "_orig_mod", None)  # torch.compile
        if isinstance(module, DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module, through
        module = inner


def _identities(module: nn.Module) -> dict[str, tuple]:
    """What DDP relies on of each parameter that it averages."""
    trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    return {name: (id(p), str(p.device), str(p.dtype)) for name, p in trained}


def _part(tensor: Tensor) -> Tensor:
    values = tensor.detach().reshape(-1)
    stride = max(1, values.numel() // VALUES)
    return values[::stride][:VALUES].to("cpu", torch.float64, copy=True)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """A part of each parameter that is whole on every rank: FSDP's are not."""
    parts = {}
    for name, parameter in module.named_parameters():
        sharded = isinstance(parameter, DTensor) or "_flat_param" in name
        if parameter.is_floating_point() and not sharded:
            parts[name] = _part(parameter)
    return parts


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            found[f"{name}.running_mean"] = _part(part.running_mean)
            found[f"{name}.running_var"] = _part(part.running_var)
    return found
