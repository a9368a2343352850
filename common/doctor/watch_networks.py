"""Observers of networks: forwards, weights, BatchNorm's statistics, and the random numbers that a forward draws.

They are torch's hooks for all modules. A network is what the script calls itself; modules within it are a part of it.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from common.doctor.generators import note_draws, states
from common.doctor.record import Network
from common.doctor.watch_data import DataWatch
from common.doctor.watcher import Watcher

VALUES = 512  # of a parameter, spread over it
OFTEN = 16  # up to this step weights are noted after each, then after every power of two
DRAWS = 64  # forwards before and after which the generators are looked at


class NetworkWatch:
    """The networks of a script.

    Attributes:
        networks: what was noted of each.
    """

    def __init__(self, watcher: Watcher, data: DataWatch) -> None:
        self.networks: weakref.WeakKeyDictionary[nn.Module, Network] = weakref.WeakKeyDictionary()
        self._watcher = watcher
        self._record = watcher.record
        self._data = data
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of those networks
        self._wrapped: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple]] = weakref.WeakKeyDictionary()
        self._called: nn.Module | None = None  # the module that the script has called, while it runs
        self._generators: dict[str, int] | None = None  # their states before the forward that runs

    def note_wrapping(self, _: None, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self._wrapped[ddp.module] = _identities(ddp.module)

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._called is None:
            self._called = module
            self._note_call(module, inputs)
        network = self.networks.get(module)
        if network is None:
            return
        # If DDP copies rank 0's buffers, it has done so before this hook.
        if not module.training:
            network.statistics.setdefault(self._record.steps, _statistics(module))
        elif self._watcher.gradients and network.forwards <= DRAWS:
            self._generators = states(next(module.parameters()).device)

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module is self._called:
            self._called = None
        if module in self.networks and self._generators is not None:
            note_draws(self._record.forward_draws, self._generators, next(module.parameters()).device)
            self._generators = None

    def _note_call(self, called: nn.Module, inputs: Any) -> None:
        """The script has called a network, by itself or in its wrappers."""
        *wrappers, module = _unwrapped(called)
        network = self._network(module)
        if network is None:
            return
        is_training = module.training and self._watcher.gradients
        if is_training:
            network.forwards += 1
            self._data.note_forward(inputs)
            self._note_wrappers(module, network, wrappers)
        # Without a wrapper, or in an evaluation before it is wrapped, the ranks' first weights may differ.
        if self._record.steps or (is_training and network.wrapped):
            self._note_weights(module, network)

    def _note_wrappers(self, module: nn.Module, network: Network, wrappers: list[nn.Module]) -> None:
        """Compare a forward in training with what DistributedDataParallel was given."""
        holds_wrapper = any(isinstance(part, DistributedDataParallel) for part in module.modules())
        network.wrapped = module in self._wrapped or holds_wrapper
        if module not in self._wrapped:
            return
        if not any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers):
            network.past_wrapper += 1
        when_wrapped = self._wrapped[module]
        now = _identities(module)
        network.changed = [name for name in now if when_wrapped.get(name) != now[name]]

    def _network(self, module: nn.Module) -> Network | None:
        """What is noted of a network, which may be new; None for a part of one, and for what has no parameters."""
        known = self.networks.get(module)
        if known is not None or module in self._parts:
            return known
        parameters = list(module.parameters())
        if not parameters:
            return None
        network = Network(type(module).__name__, len(parameters))
        network.has_module = "module" in dict(module.named_children())
        self.networks[module] = network
        self._parts.update(module.modules())
        self._record.networks.append(network)
        return network

    def _note_weights(self, module: nn.Module, network: Network) -> None:
        steps = self._record.steps
        is_power_of_two = steps & (steps - 1) == 0
        if (steps <= OFTEN or is_power_of_two) and steps not in network.weights:
            network.weights[steps] = _parameters(module)


def install(watcher: Watcher, data: DataWatch) -> NetworkWatch:
    watch = NetworkWatch(watcher, data)
    register_module_forward_pre_hook(watcher.observer(watch.before_forward))
    register_module_forward_hook(watcher.observer(watch.after_forward), always_call=True)
    watcher.watch(DistributedDataParallel, "__init__", after=watch.note_wrapping)
    return watch


def _unwrapped(module: nn.Module) -> list[nn.Module]:
    """The module, what it wraps, and so on; the last one is the network."""
    chain = []
    inner: Any = module
    while isinstance(inner, nn.Module):
        chain.append(inner)
        if isinstance(inner, DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        else:
            inner = getattr(inner, "_orig_mod", None)  # torch.compile
    return chain


def _identities(module: nn.Module) -> dict[str, tuple]:
    """What DDP relies on of each parameter that it averages."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found[name] = (id(parameter), str(parameter.device), str(parameter.dtype))
    return found


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
