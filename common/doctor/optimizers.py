"""Optimizers: they have the networks' parameters, and step alike on all ranks.

The observers are torch's hooks for all optimizers.
"""

import math
import os
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.networks import NetworkWatch
from common.doctor.record import Record, across_ranks, steps_with_different_rates
from common.doctor.recorder import Recorder
from common.doctor.replicas import trained

STEPS_COMPARED = 16  # after which the optimizers' parameters are compared with the networks'


class OptimizerWatch:
    """The optimizers of a script; it ends the process after `last_step`."""

    def __init__(self, recorder: Recorder, networks: NetworkWatch, last_step: int | None) -> None:
        self._recorder = recorder
        self._record = recorder.record
        self._networks = networks.networks
        self._last_step = last_step
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._inner: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose step is called by that of another one

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        inner = getattr(optimizer, "optim", None)  # of a ZeroRedundancyOptimizer
        if isinstance(inner, Optimizer):
            self._inner.add(inner)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        if optimizer in self._inner:
            return
        record = self._record
        record.steps += 1
        if record.steps <= STEPS_COMPARED:
            self._compare_with_networks()
        rates = []
        for group in optimizer.param_groups:
            rate = group["lr"]
            if rate is None:  # as of Adafactor, which works it out for each step
                rate = math.nan
            rates.append(float(rate))
        record.learning_rates.append(rates)
        record.forwards_until_step.append(sum(network.forwards for network in record.networks))
        if record.steps == self._last_step:
            self._recorder.finish("steps")
            os._exit(0)

    def _compare_with_networks(self) -> None:
        in_optimizers: dict[int, nn.Parameter] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                in_optimizers.update({id(parameter): parameter for parameter in group["params"]})
        in_networks = set()
        in_no_optimizer = []
        for module, network in self._networks.items():
            network.without_gradient = []
            for name, parameter in module.named_parameters():
                in_networks.add(id(parameter))
                if parameter.grad is None and parameter.requires_grad:
                    network.without_gradient.append(name)
                if network.forwards and parameter.grad is not None and id(parameter) not in in_optimizers:
                    in_no_optimizer.append(name)
        self._record.in_no_optimizer = in_no_optimizer
        self._record.in_no_network = 0
        for key, parameter in in_optimizers.items():
            if key not in in_networks and parameter.grad is None:
                self._record.in_no_network += 1


def watch(recorder: Recorder, networks: NetworkWatch, last_step: int | None) -> None:
    optimizers = OptimizerWatch(recorder, networks, last_step)
    register_optimizer_step_pre_hook(recorder.observer(optimizers.before_step))
    register_optimizer_step_post_hook(recorder.observer(optimizers.after_step))


def check_parameters(records: list[Record]) -> Answer:
    if not records[0].steps or not trained(records):
        return NotExamined("no optimizer step was seen")
    # Either alone may be meant: a part that is frozen by leaving it out, or a parameter that no network holds. Both
    # together are a part that was replaced: the optimizer has the old parameters, and the network the new ones.
    for record in records:
        missing = record.in_no_optimizer
        if missing and record.in_no_network:
            return Finding(
                f"{record.in_no_network} parameters of the optimizers are of no network, and {len(missing)} parameters "
                f"of the networks have gradients and are in no optimizer ({', '.join(missing[:3])})",
                "make the optimizer last, from the parameters that are trained",
                pitfall="replaced_parameters",
            )
    return Right()


def check_learning_rates(records: list[Record]) -> Answer:
    steps = across_ranks(record.learning_rates for record in records)
    if not steps:
        return NotExamined("no optimizer step was seen on all ranks")
    different = steps_with_different_rates(records)
    if not different:
        return Right()
    first = different[0]
    rates_by_rank = []
    for rank, rates in enumerate(steps[first]):
        distinct = " and ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        rates_by_rank.append(f"rank {rank} has {distinct}")
    counted = f"the ranks' learning rates differ at {len(different)} of {len(steps)} steps"
    text = f"{counted}; at step {first + 1} {', '.join(rates_by_rank)}"
    changes = [any(rates != record.learning_rates[0] for rates in record.learning_rates) for record in records]
    if changes[0] and not any(changes[1:]):
        text += "; it never changes on another rank than rank 0"
        return Finding(text, "let all ranks step the scheduler", pitfall="schedule_on_rank_0")
    return Finding(text, "give all ranks the same learning rate, and let them step the scheduler equally often")
