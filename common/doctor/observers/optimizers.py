"""Optimizers: their steps, and their parameters beside those of the networks."""

import itertools
import os
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.doctor.observers.networks import NetworkObserver
from common.doctor.observers.recorder import Recorder
from common.doctor.record import FIRST_STEPS, Step


class OptimizerObserver:
    def __init__(self, recorder: Recorder, networks: NetworkObserver, last_step: int | None) -> None:
        self._recorder = recorder
        self._record = recorder.record
        self._networks = networks.networks
        self._last_step = last_step  # the number of the step after which the script is ended
        self._new_numbers = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._forwards_before = 0  # the number of forwards in training until the last step

    def install(self) -> None:
        register_optimizer_step_post_hook(self._recorder.guarded(self.after_step))

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._new_numbers)
        if isinstance(getattr(optimizer, "optim", None), Optimizer):
            return  # a ZeroRedundancyOptimizer: the optimizer of its part has made the step
        given = [group.get("lr") for group in optimizer.param_groups]
        rates = [None if rate is None else float(rate) for rate in given]
        forwards = sum(network.forwards for network in self._record.networks)
        self._record.steps.append(Step(rates, forwards - self._forwards_before, self._numbers[optimizer]))
        self._forwards_before = forwards
        if len(self._record.steps) <= FIRST_STEPS:
            self._note_parameters()
        if len(self._record.steps) == self._last_step:
            self._recorder.finish("steps")
            os._exit(0)

    def _note_parameters(self) -> None:
        in_optimizers: set[nn.Parameter] = set()
        for optimizer in self._numbers:
            for group in optimizer.param_groups:
                in_optimizers.update(group["params"])
        in_networks: set[nn.Parameter] = set()
        self._record.trained_in_no_optimizer = []
        for module, network in self._networks.items():
            for name, parameter in module.named_parameters():
                in_networks.add(parameter)
                if network.forwards and parameter.grad is not None and parameter not in in_optimizers:
                    self._record.trained_in_no_optimizer.append(name)
        self._record.optimized_in_no_network = sum(parameter.grad is None for parameter in in_optimizers - in_networks)
