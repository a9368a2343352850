"""Networks: the ranks must be replicas of each other.

The observers are torch's hooks for all modules. A network is what the script calls itself; modules within it are a part
of it.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.data import DataWatch
from common.doctor.random_numbers import note_draws, states
from common.doctor.record import Network, Record, across_ranks, steps_with_different_rates
from common.doctor.recorder import Recorder
from common.weights import distance

VALUES = 512  # of a parameter, spread over it
OFTEN = 16  # up to this step weights are noted after each, then after every power of two
DRAWS = 64  # forwards before and after which the generators are looked at
TOLERANCE = 1e-6  # of the largest finite number of a tensor; ranks that average have equal bits on CPUs

Tensors = dict[str, Tensor]


class NetworkWatch:
    """The networks of a script, and what was noted of each."""

    def __init__(self, recorder: Recorder, data: DataWatch) -> None:
        self.networks: weakref.WeakKeyDictionary[nn.Module, Network] = weakref.WeakKeyDictionary()
        self._record = recorder.record
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
        elif torch.is_grad_enabled() and network.forwards <= DRAWS:
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
        is_training = module.training and torch.is_grad_enabled()
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


def watch(recorder: Recorder, data: DataWatch) -> NetworkWatch:
    networks = NetworkWatch(recorder, data)
    register_module_forward_pre_hook(recorder.observer(networks.before_forward))
    register_module_forward_hook(recorder.observer(networks.after_forward), always_call=True)
    recorder.watch(DistributedDataParallel, "__init__", after=networks.note_wrapping)
    return networks


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


def difference(by_rank: list[Tensors]) -> str | None:
    """How rank 0 and the first rank with other tensors differ; None if all ranks have the same."""
    first = by_rank[0]
    for rank, tensors in enumerate(by_rank[1:], 1):
        distances = {}
        for name, values in first.items():
            if name not in tensors or tensors[name].shape != values.shape or not values.numel():
                continue
            apart = distance(values, tensors[name])  # infinite if only one of two numbers is a nan
            finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            if apart > TOLERANCE * finite.abs().max().item():
                distances[name] = apart
        if distances:
            count = f"{len(distances)} of {len(first)} tensors by up to {max(distances.values()):.1e}"
            return f"rank 0 and {rank} differ in {count} ({', '.join(list(distances)[:3])})"
    return None


def differences(noted: list[dict[int, Tensors]]) -> dict[int, str | None]:
    """The difference after each number of steps after which all ranks have noted tensors."""
    found = {}
    for step in sorted(noted[0]):
        by_rank = [tensors.get(step) for tensors in noted]
        if all(by_rank):
            found[step] = difference(by_rank)
    return found


def trained(records: list[Record]) -> list[tuple[Network, ...]]:
    """The networks that all ranks have trained: for each the observations of all ranks."""
    by_rank = [[network for network in record.networks if network.forwards] for record in records]
    same = []
    for networks in across_ranks(by_rank):
        shapes = {(network.kind, network.parameter_count) for network in networks}
        if len(shapes) == 1:
            same.append(networks)
    return same


def weights(records: list[Record]) -> Answer:
    same_rates = not steps_with_different_rates(records)
    answers = [_weights_of(by_rank, same_rates) for by_rank in trained(records)]
    return overall(answers, "no network was trained on all ranks")


def _weights_of(by_rank: tuple[Network, ...], same_rates: bool) -> Answer:
    by_step = differences([network.weights for network in by_rank])
    before_training = by_step.pop(0, None)
    if not by_step:
        return NotExamined("no optimizer step was seen on all ranks, or no rank has whole parameters")
    steps_apart = [step for step, found in by_step.items() if found]
    if not steps_apart:
        return Right()
    first = steps_apart[0]
    if any(step > first and found is None for step, found in by_step.items()):
        return Right()  # only every n-th step averages the weights, and then they come together again
    text = f"{by_step[first]} after step {first}"
    finding = _cause_of(text, before_training, by_rank)
    if finding:
        return finding
    if not same_rates:
        return NotExamined("other learning rates make other weights")
    return Finding(text, "no further cause was seen: look for `no_sync`, and for updates that not all ranks make")


def _cause_of(text: str, before_training: str | None, by_rank: tuple[Network, ...]) -> Finding | None:
    """The finding with its cause, where one was observed."""
    changed = max(len(network.changed) for network in by_rank)
    if changed:
        return Finding(
            f"{text}: {changed} parameters are not those that DistributedDataParallel wrapped",
            "move, convert and unfreeze the network first, and wrap it last",
            pitfall="moved_after_wrapping",
        )
    worst = max(by_rank, key=lambda network: network.past_wrapper)
    if worst.past_wrapper:
        past = f"{worst.past_wrapper} of {worst.forwards} forwards in training went past DistributedDataParallel"
        return Finding(
            f"{text}: {past}", "call the wrapper in training, not its `.module`", pitfall="forward_through_module"
        )
    if not any(network.wrapped for network in by_rank):
        return Finding(
            f"{text}: no DistributedDataParallel holds the network",
            "wrap it, and train the wrapper: that copies rank 0's weights, and averages the gradients",
            pitfall="forward_through_module",
        )
    if before_training:
        return Finding(
            f"{before_training} before the first step, though DistributedDataParallel holds the network",
            "load and initialise weights before wrapping, or on all ranks alike",
        )
    return None


def batchnorm(records: list[Record]) -> Answer:
    return overall(map(_statistics_of, trained(records)), "no BatchNorm was evaluated on several ranks")


def _statistics_of(by_rank: tuple[Network, ...]) -> Answer:
    by_step = differences([network.statistics for network in by_rank])
    by_step.pop(0, None)
    if not by_step:
        return NotExamined("no BatchNorm was evaluated on several ranks")
    for step, found in by_step.items():
        if found:
            return Finding(
                f"{found} in the evaluation after step {step}",
                "broadcast the buffers of rank 0 before an evaluation, or use SyncBatchNorm",
                pitfall="batchnorm_statistics",
            )
    return Right()
