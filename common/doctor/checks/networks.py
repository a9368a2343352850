"""The observer of networks: it notes their forwards, and what stands between a forward and DistributedDataParallel."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from common.doctor.checks.contents import count_samples
from common.doctor.checks.loaders import LoaderObserver
from common.doctor.checks.random_numbers import note_draws, states
from common.doctor.checks.weights import is_shard, note_statistics, note_weights
from common.doctor.record import Network
from common.doctor.recorder import Recorder


@dataclass
class Forward:
    """A forward that the script has started, and that has not returned. What it calls in turn is a part of it."""

    called: nn.Module  # the network, or its wrapper
    module: nn.Module  # the network
    in_training: bool  # in training mode and with gradients
    generators: dict[str, int] = field(default_factory=dict)  # in training: the states of the random generators before


class NetworkObserver:
    def __init__(self, recorder: Recorder, loaders: LoaderObserver) -> None:
        self.networks: weakref.WeakKeyDictionary[nn.Module, Network] = weakref.WeakKeyDictionary()
        self._recorder = recorder
        self._record = recorder.record
        self._loaders = loaders
        self._forward: Forward | None = None  # the forward that runs
        # The identities of a network's parameters when DistributedDataParallel was given it.
        self._when_wrapped: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        torch.compiler.set_stance("force_eager")  # torch.compile would compile the hooks too, and may fail at them
        register_module_forward_pre_hook(self._recorder.guarded(self.before_forward))
        register_module_forward_hook(self._recorder.guarded(self.after_forward), with_kwargs=True, always_call=True)
        self._recorder.wrap(DistributedDataParallel, "__init__", after=self.after_wrapping)

    def after_wrapping(self, _: None, ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        module = _unwrapped(ddp)[1]
        self._when_wrapped[module] = _identities(module)

    def before_forward(self, called: nn.Module, inputs: tuple) -> None:
        if self._forward is not None or next(called.parameters(), None) is None:
            return  # a part of a network, or a loss
        if torch._C._current_graph_task_id() != -1:
            return  # in a backward, in which activation checkpointing computes a part again
        wrappers, module = _unwrapped(called)
        in_training = module.training and torch.is_grad_enabled()
        # Before what may fail: else each part of the network would count as a network.
        self._forward = Forward(called, module, in_training)
        if module not in self.networks:  # its first forward
            self.networks[module] = Network()
            self._record.networks.append(self.networks[module])
            self._record.is_sharded |= any(is_shard(name, parameter) for name, parameter in module.named_parameters())
            self._record.is_tensor_parallel |= _is_tensor_parallel(module)
        if in_training:  # in an evaluation a rank may have put averaged weights in
            network = self.networks[module]
            self._note_wrapping(network, module, wrappers)
            if self._record.steps:  # before, the ranks' weights may differ
                note_weights(network, module, self._record)
            self._forward.generators = states(next(module.parameters()).device)
        elif batch := self._loaders.batch_in_use():
            batch.evaluated = True  # before the forward: under DDP it may wait for the other ranks

    def after_forward(self, called: nn.Module, inputs: tuple, keywords: dict | None, output: Any = None) -> None:
        """Note what a forward has done. Where it has raised, torch gives neither keywords nor an output."""
        forward = self._forward
        if forward is None or called is not forward.called:
            return
        self._forward = None
        network = self.networks[forward.module]
        if forward.in_training:
            network.forwards += 1
            if not network.shapes:  # lazy layers have them after a forward
                named = list(forward.module.named_parameters())
                network.shapes = {name: tuple(part.shape) for name, part in named if not is_shard(name, part)}
                network.trained_numbers = sum(part.numel() for _, part in named if part.requires_grad)
            if batch := self._loaders.batch_in_use():
                batch.forwards.append(count_samples(inputs, keywords))
            device = next(forward.module.parameters()).device
            note_draws(self._record, "forwards in training", forward.generators, device)
        if not forward.module.training:
            note_statistics(network, forward.module, len(self._record.steps))

    def _note_wrapping(self, network: Network, module: nn.Module, wrappers: list[nn.Module]) -> None:
        before = self._when_wrapped.get(module)
        if before is None:
            network.wrapped = any(isinstance(part, DistributedDataParallel) for part in module.modules())
            return
        network.wrapped = True
        if not any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers):
            network.past_wrapper += 1
        now = _identities(module)
        # The newest forward counts: a script may take a change back. Forwards past the wrapper add up instead.
        network.changed = [name for name in now if before.get(name) != now[name]]


def _unwrapped(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The wrappers of a network, the outermost first, and the network."""
    chain = []
    inner: Any = module
    while isinstance(inner, nn.Module):
        chain.append(inner)
        is_parallel = isinstance(inner, DistributedDataParallel | nn.DataParallel)
        inner = inner.module if is_parallel else getattr(inner, "_orig_mod", None)  # torch.compile has this one
    return chain[:-1], chain[-1]


def _identities(module: nn.Module) -> dict[str, tuple]:
    """The id, device and dtype of each parameter that DDP averages, which must not change."""
    averaged = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {name: (id(parameter), str(parameter.device), str(parameter.dtype)) for name, parameter in averaged}


def _is_tensor_parallel(module: nn.Module) -> bool:
    """True if it has DTensors, unless fully_shard put them on a 1-D mesh of all ranks: there each has whole samples."""
    meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
    is_fully_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    computes_whole_samples = is_fully_sharded and all(mesh.shape == (dist.get_world_size(),) for mesh in meshes)
    return bool(meshes) and not computes_whole_samples
