"""Networks: their forwards in training, their weights after steps, and their statistics in evaluations.

A network is what the script calls, itself or through a wrapper. The modules that a network calls are a part of it.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from common.doctor.observers.contents import count_samples
from common.doctor.observers.generators import note_draws, states
from common.doctor.observers.loaders import LoaderObserver
from common.doctor.observers.recorder import Recorder
from common.doctor.observers.tensors import identities, is_part, is_split, shapes, some_statistics, some_weights
from common.doctor.record import EACH_STEP_UNTIL, Network


class Forward(NamedTuple):
    """A forward that the script has started, and that has not returned. What it calls in turn is a part of it."""

    called: nn.Module  # the network, or its wrapper
    module: nn.Module  # the network
    in_training: bool  # in training mode and with gradients
    generators: dict[str, int]  # the states of the random generators at its start; empty in an evaluation


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
        self._when_wrapped[module] = identities(module)

    def before_forward(self, called: nn.Module, inputs: tuple) -> None:
        if self._forward is not None or next(called.parameters(), None) is None:
            return  # a part of a network, or a loss
        if torch._C._current_graph_task_id() != -1:
            return  # in a backward, in which activation checkpointing computes a part again
        wrappers, module = _unwrapped(called)
        in_training = module.training and torch.is_grad_enabled()
        # Before what may fail: else each part of the network would count as a network.
        self._forward = Forward(called, module, in_training, generators={})
        if module not in self.networks:
            self._add(module)  # at its first forward
        if in_training:  # in an evaluation a rank may have put averaged weights in
            self._note_wrapping(module, wrappers)
            self._note_changes(module)
            if self._record.steps:  # before, the ranks' weights may differ
                self._note_weights(module)  # at the first forward after a step: these are the step's
            self._forward.generators.update(states(next(module.parameters()).device))

    def after_forward(self, called: nn.Module, inputs: tuple, keywords: dict | None, output: Any = None) -> None:
        """Note what a forward has done. Where it has raised, torch gives neither keywords nor an output."""
        forward = self._forward
        if forward is None or called is not forward.called:
            return
        self._forward = None
        network = self.networks[forward.module]
        batch = self._loaders.batch_in_use()
        if forward.in_training:
            network.forwards += 1
            network.shapes = network.shapes or shapes(forward.module)  # lazy layers have them after a forward
            if batch:
                batch.forwards.append(count_samples(inputs, keywords))
            device = next(forward.module.parameters()).device
            note_draws(self._record, "forwards in training", forward.generators, device)
        elif batch:
            batch.evaluated = True
        if not forward.module.training:
            steps = len(self._record.steps)
            # If DDP copies rank 0's statistics, it has done so in this forward. An evaluation changes none.
            if steps not in network.statistics:
                network.statistics[steps] = some_statistics(forward.module)

    def _add(self, module: nn.Module) -> None:
        self.networks[module] = Network()
        self._record.networks.append(self.networks[module])
        self._record.is_sharded |= any(is_part(name, parameter) for name, parameter in module.named_parameters())
        self._record.is_split |= is_split(module)

    def _note_wrapping(self, module: nn.Module, wrappers: list[nn.Module]) -> None:
        network = self.networks[module]
        is_inside = module in self._when_wrapped
        network.wrapped = is_inside or any(isinstance(part, DistributedDataParallel) for part in module.modules())
        if is_inside and not any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers):
            network.past_wrapper += 1

    def _note_changes(self, module: nn.Module) -> None:
        before = self._when_wrapped.get(module)
        if before is not None:
            now = identities(module)
            # The newest forward counts: a script may take a change back. Forwards past the wrapper add up instead.
            self.networks[module].changed = [name for name in now if before.get(name) != now[name]]

    def _note_weights(self, module: nn.Module) -> None:
        weights = self.networks[module].weights
        steps = len(self._record.steps)
        is_power_of_two = steps & (steps - 1) == 0
        if (steps <= EACH_STEP_UNTIL or is_power_of_two) and steps not in weights:
            weights[steps] = some_weights(module)


def _unwrapped(module: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The wrappers of a network, the outermost first, and the network."""
    chain = []
    inner: Any = module
    while isinstance(inner, nn.Module):
        chain.append(inner)
        is_parallel = isinstance(inner, DistributedDataParallel | nn.DataParallel)
        inner = inner.module if is_parallel else getattr(inner, "_orig_mod", None)  # torch.compile has this one
    return chain[:-1], chain[-1]
