"""Observers of optimizers: steps, learning rates, and whether networks and optimizers have the same parameters.

They are torch's hooks for all optimizers.
"""

import math
import os
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.doctor.watch_networks import NetworkWatch
from common.doctor.watcher import Watcher

COMPARED = 16  # steps after which parameters are compared


class OptimizerWatch:
    """The optimizers of a script; it ends the process after `last_step`."""

    def __init__(self, watcher: Watcher, networks: NetworkWatch, last_step: int | None) -> None:
        self._watcher = watcher
        self._record = watcher.record
        self._networks = networks.networks
        self._last_step = last_step
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._nesting = 0  # ZeroRedundancyOptimizer's step calls the step of another optimizer
        self._forwards = 0  # until the last step

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._nesting += 1
        if self._record.steps:
            return
        for module, network in self._networks.items():
            network.without_gradient = []
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and parameter.grad is None:
                    network.without_gradient.append(name)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        self._nesting -= 1
        if self._nesting > 0:
            return
        record = self._record
        record.steps += 1
        if record.steps <= COMPARED:
            self._compare_with_networks()
        rates = []
        for group in optimizer.param_groups:
            rate = group["lr"]
            if rate is None:  # as of Adafactor, which works it out for each step
                rate = math.nan
            rates.append(float(rate))
        record.learning_rates.append(rates)
        forwards = sum(network.forwards for network in record.networks)
        record.forwards_of_steps.append(forwards - self._forwards)
        self._forwards = forwards
        if record.steps == self._last_step:
            self._watcher.finish("steps")
            os._exit(0)

    def _compare_with_networks(self) -> None:
        in_optimizers: dict[int, nn.Parameter] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                in_optimizers.update({id(parameter): parameter for parameter in group["params"]})
        in_networks = set()
        in_no_optimizer = []
        for module, network in self._networks.items():
            for name, parameter in module.named_parameters():
                in_networks.add(id(parameter))
                if network.forwards and parameter.grad is not None and id(parameter) not in in_optimizers:
                    in_no_optimizer.append(name)
        self._record.in_no_optimizer = in_no_optimizer
        self._record.in_no_network = 0
        for key, parameter in in_optimizers.items():
            if key not in in_networks and parameter.grad is None:
                self._record.in_no_network += 1


def install(watcher: Watcher, networks: NetworkWatch, last_step: int | None) -> None:
    watch = OptimizerWatch(watcher, networks, last_step)
    register_optimizer_step_pre_hook(watcher.observer(watch.before_step))
    register_optimizer_step_post_hook(watcher.observer(watch.after_step))
