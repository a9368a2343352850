"""Optimizers: their parameters, their learning rates, the schedule, and the micro-batches of a step.

The schedule and the micro-batches are asked of rank 0 alone: the ranks run one script, and make such mistakes alike.
"""

import itertools
import os
import weakref
from collections import defaultdict
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.doctor.checks.alignment import corresponding_steps, no_difference
from common.doctor.record import Network, Rates, Record, Step
from common.doctor.recorder import Recorder
from common.doctor.results import Finding, Passed, Result, Skipped

FIRST_STEPS = 16  # an optimizer's parameters are noted after each of these, and the last one counts
TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one
Networks = weakref.WeakKeyDictionary[nn.Module, Network]


class OptimizerObserver:
    def __init__(self, recorder: Recorder, networks: Networks, last_step: int | None) -> None:
        self._recorder = recorder
        self._record = recorder.record
        self._networks = networks
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
            os._exit(0)  # no `finally` of the script shall wait for other ranks

    def _note_parameters(self) -> None:
        groups = [group for optimizer in self._numbers for group in optimizer.param_groups]
        in_optimizers = {parameter for group in groups for parameter in group["params"]}
        in_networks: set[nn.Parameter] = set()
        self._record.trained_in_no_optimizer = []
        for module, network in self._networks.items():
            for name, parameter in module.named_parameters():
                in_networks.add(parameter)
                if network.forwards and parameter.grad is not None and parameter not in in_optimizers:
                    self._record.trained_in_no_optimizer.append(name)
        self._record.optimized_in_no_network = sum(parameter.grad is None for parameter in in_optimizers - in_networks)


def check_parameters(records: list[Record]) -> Result:
    """A Finding if the optimizers lack parameters of the networks, and have others instead; else Passed."""
    has_trained = [record.steps and any(network.forwards for network in record.networks) for record in records]
    if not any(has_trained):
        return Skipped("no optimizer step after a training forward was seen")
    for record in records:
        untrained = record.trained_in_no_optimizer
        if record.optimized_in_no_network and untrained:  # either alone may be meant, as to freeze a part
            text = f"{record.optimized_in_no_network} parameters of the optimizers are of no network, and "
            text += f"{len(untrained)} of the networks have gradients, but no optimizer ({', '.join(untrained[:3])})"
            advice = "make the optimizer last, from the parameters that are trained"
            return Finding(text, advice, pitfall="optimizer_made_first" if record.is_sharded else "replaced_parameters")
    return Passed()


def check_learning_rates(records: list[Record]) -> Result:
    """Passed if all ranks have the same learning rates at each step; a Finding if not."""
    steps = corresponding_steps(records)
    if not steps:
        return Skipped("no optimizer step was seen that all ranks make together")
    different = [number for number, of_ranks in enumerate(steps) if not have_same_rates(of_ranks)]
    if not different:
        return no_difference(records)
    first = different[0]
    rates_by_rank = [f"rank {rank} has {step.learning_rates}" for rank, step in enumerate(steps[first])]
    counted = f"the ranks' learning rates differ at {len(different)} of {len(steps)} steps"
    text = f"{counted}; at step {first + 1} {', '.join(rates_by_rank)}"
    if schedules(records[0]) and not any(map(schedules, records[1:])):
        text += "; it never changes on another rank than rank 0"
        return Finding(text, "let all ranks step the scheduler", pitfall="schedule_on_rank_0")
    return Finding(text, "give all ranks the same learning rate, and let them step the scheduler equally often")


def check_schedule(records: list[Record]) -> Result:
    """A Finding if an optimizer has a learning rate of 0 in its last three steps; else Passed if a rate changes."""
    of_optimizers = schedules(records[0])
    if not of_optimizers:
        return Skipped("no change of a learning rate was seen")
    for rates in of_optimizers:
        not_zero = [step for step, of_step in enumerate(rates, start=1) if any(rate != 0 for rate in of_step)]
        zeros = len(rates) - max(not_zero, default=0)
        if zeros >= TRAILING_ZEROS:
            text = f"the learning rate is 0 in the last {zeros} of {len(rates)} steps"
            advice = "write the schedule for as many calls of its `step` as there are"
            return Finding(text, advice, pitfall="schedule_too_fast")
    return Passed()


def check_accumulation(records: list[Record]) -> Result:
    """A Finding if the first step has fewer micro-batches than the next two, which have equally many."""
    first = records[0]
    trained = [network for network in first.networks if network.forwards]
    if len(trained) != 1:
        return Skipped(f"the micro-batches of one network can be counted, but {len(trained)} were trained")
    # A second optimizer may step after the same forwards: then it has none of its own.
    micro_batches = [step.micro_batches for step in first.steps if step.micro_batches][:3]
    if len(micro_batches) < 3:
        return Skipped("fewer than three optimizer steps after a forward were seen")
    if micro_batches[0] < micro_batches[1] == micro_batches[2]:
        text = f"the steps are of {', '.join(map(str, micro_batches))}, … micro-batches"
        advice = "count micro-batches from 1, and close the last window where the data end"
        return Finding(text, advice, pitfall="accumulation_off_by_one")
    return Passed()


def have_same_rates(of_ranks: tuple[Step, ...]) -> bool:
    return all(step.learning_rates == of_ranks[0].learning_rates for step in of_ranks)


def schedules(record: Record) -> list[list[Rates]]:
    """For each optimizer whose learning rates change: its rates, step by step."""
    by_optimizer = defaultdict(list)
    for step in record.steps:
        by_optimizer[step.optimizer].append(step.learning_rates)
    return [rates for rates in by_optimizer.values() if any(of_step != rates[0] for of_step in rates)]
