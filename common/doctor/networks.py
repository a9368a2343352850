"""Networks: what is noted of each, by torch's hooks for all modules.

A network is what the script calls, itself or through a wrapper. The modules that a network calls are a part of it.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from common.doctor.data import DataWatch
from common.doctor.random_numbers import note_draws, states
from common.doctor.record import Network, Tensors
from common.doctor.recorder import Recorder

VALUES_PER_PARAMETER = 512  # spread over it
EACH_STEP_UNTIL = 16  # weights are noted after each step up to this one, then after every power of two
FORWARDS_WATCHED = 64  # before and after which the generators are looked at


class Forward(NamedTuple):
    """A forward that the script has started, and that has not returned."""

    called: nn.Module  # the network, or a wrapper of it
    module: nn.Module  # the network itself
    network: Network | None  # None for a module without parameters, such as a loss
    generators: dict[str, int] | None  # in training the states of the random generators at its start


class NetworkWatch:
    """The networks of a script, and what was noted of each."""

    def __init__(self, recorder: Recorder, data: DataWatch) -> None:
        self.networks: weakref.WeakKeyDictionary[nn.Module, Network] = weakref.WeakKeyDictionary()
        self._record = recorder.record
        self._data = data
        self._forward: Forward | None = None  # the one that runs

    def note_wrapping(self, _: None, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        self._network(ddp.module).when_wrapped = _identities(ddp.module)

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._forward is None:
            self._forward = self._start(module, inputs)
        network = self._forward.network
        # If DDP copies rank 0's buffers, it has done so before it calls the network.
        if network is not None and module is self._forward.module and not module.training:
            network.statistics.setdefault(self._record.steps, _statistics(module))

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        forward = self._forward
        if forward is None or module is not forward.called:
            return
        self._forward = None
        if forward.generators is not None:
            note_draws(self._record.forward_draws, forward.generators, next(module.parameters()).device)

    def _start(self, called: nn.Module, inputs: Any) -> Forward:
        """Note that the script has called a network, by itself or in its wrappers."""
        *wrappers, module = _unwrapped(called)
        if next(module.parameters(), None) is None:
            return Forward(called, module, network=None, generators=None)
        network = self._network(module)
        generators = None
        is_training = module.training and torch.is_grad_enabled()
        if is_training:
            network.forwards += 1
            self._data.note_forward(inputs)
            _compare_with_wrapping(module, network, wrappers)
            if network.forwards <= FORWARDS_WATCHED:
                generators = states(next(module.parameters()).device)
        # Without a wrapper, or in an evaluation before it is wrapped, the ranks' first weights may differ.
        if self._record.steps or (is_training and network.wrapped):
            self._note_weights(module, network)
        return Forward(called, module, network, generators)

    def _network(self, module: nn.Module) -> Network:
        """The record of a network, which may be new."""
        if module not in self.networks:
            network = Network(type(module).__name__, len(list(module.parameters())))
            network.has_module = "module" in dict(module.named_children())
            self.networks[module] = network
            self._record.networks.append(network)
        return self.networks[module]

    def _note_weights(self, module: nn.Module, network: Network) -> None:
        steps = self._record.steps
        is_power_of_two = steps & (steps - 1) == 0
        if (steps <= EACH_STEP_UNTIL or is_power_of_two) and steps not in network.weights:
            network.weights[steps] = _parameters(module)


def watch(recorder: Recorder, data: DataWatch) -> NetworkWatch:
    networks = NetworkWatch(recorder, data)
    register_module_forward_pre_hook(recorder.observer(networks.before_forward))
    register_module_forward_hook(recorder.observer(networks.after_forward), always_call=True)
    recorder.watch(DistributedDataParallel, "__init__", after=networks.note_wrapping)
    return networks


def _compare_with_wrapping(module: nn.Module, network: Network, wrappers: list[nn.Module]) -> None:
    """Compare a forward in training with what DistributedDataParallel was given."""
    holds_wrapper = any(isinstance(part, DistributedDataParallel) for part in module.modules())
    network.wrapped = bool(network.when_wrapped) or holds_wrapper
    if not network.when_wrapped:
        return
    if not any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers):
        network.past_wrapper += 1
    now = _identities(module)
    network.changed = [name for name in now if network.when_wrapped.get(name) != now[name]]


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
    stride = max(1, values.numel() // VALUES_PER_PARAMETER)
    return values[::stride][:VALUES_PER_PARAMETER].to("cpu", torch.float64, copy=True)


def _parameters(module: nn.Module) -> Tensors:
    """A part of each parameter that is whole on every rank: FSDP's are not."""
    parts = {}
    for name, parameter in module.named_parameters():
        sharded = isinstance(parameter, DTensor) or "_flat_param" in name
        if parameter.is_floating_point() and not sharded:
            parts[name] = _part(parameter)
    return parts


def _statistics(module: nn.Module) -> Tensors:
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            found[f"{name}.running_mean"] = _part(part.running_mean)
            found[f"{name}.running_var"] = _part(part.running_var)
    return found
