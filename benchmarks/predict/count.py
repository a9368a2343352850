"""Counts a network of somebody else's: layer by layer, its multiply-adds, operators and bytes.

Nothing is computed (see `hollow`). An RNN, GRU or LSTM of torch is counted step by step in time: each time step has
operators of its own. On a GPU it is one operator of torch, for which cuDNN fuses the operations of a time step and
batches those of several (Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). How
many kernels that makes is not published.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.fused_attention import FusedAttention
from benchmarks.harness.hollow import flat, hollow_if_possible
from benchmarks.predict.step import Layer, Network
from benchmarks.your_network import training
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import UserNetwork

EXAMPLES = 2  # a batch normalisation needs more than one
# Operators that start no kernel: they give a tensor another shape, make room, read a number that lies on the host (as
# the step that AdamW counts for each parameter), or say where they begin in a profile.
NO_KERNEL = {
    "aten._local_scalar_dense",
    "aten._unsafe_view",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
}


class Counted(NamedTuple):
    """A network, and what its counts leave out.

    Attributes:
        samples: the batch in which the multiply-adds of a sample were counted.
        recurrent: whether it has an RNN, GRU or LSTM of torch.
    """

    network: Network
    samples: int
    recurrent: bool

    @property
    def grows(self) -> bool:
        """True where a sample multiplies more in a larger batch, as where each is compared with each."""
        return self.samples > EXAMPLES


def count(network: UserNetwork, batch: int) -> Counted:
    """The network as the prediction takes it, for a `batch` on each GPU.

    Raises:
        StepFailed: if the network, its batch or its loss does not work, or it multiplies nothing.
    """
    return hollow_if_possible(partial(_count, network, batch))


def _count(network: UserNetwork, batch: int) -> Counted:
    model = training.build(network)
    optimizer = training.make_optimizer(network, model)

    def loss_of(samples: int) -> Callable[[], Tensor]:
        return partial(training.loss_of, network, model, training.make_batch(network, samples))

    with training.explained(f"a step of {network.title} failed"):
        samples = EXAMPLES
        layers = count_layers(model, loss_of(EXAMPLES), EXAMPLES)
        of_twice = count_layers(model, loss_of(2 * EXAMPLES), 2 * EXAMPLES)
        if of_twice != layers and batch > EXAMPLES:
            samples = batch
            layers = count_layers(model, loss_of(batch), batch)
        training_step(optimizer, loss_of(EXAMPLES))  # the first step also makes the optimizer's state
        few = count_step(optimizer, loss_of(EXAMPLES))
        more = max(samples, 2 * EXAMPLES)
        # What does not depend on the batch, such as the optimizer's bytes, cancels.
        bytes_of_a_sample = (count_step(optimizer, loss_of(more)).bytes - few.bytes) // (more - EXAMPLES)
    counts = Network(network.title, layers, few.operators, bytes_of_a_sample)
    if not counts.multiply_adds:
        raise StepFailed(f"{network.title} multiplies nothing that is counted, so no time can be predicted")
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return Counted(counts, samples, recurrent)


def count_layers(network: nn.Module, loss: Callable[[], Tensor], samples: int) -> tuple[Layer, ...]:
    """The modules that have parameters or multiply, in the order in which forward reaches them.

    What a module's forward multiplies belongs to it, but for what it lets its children do. A child whose forward is not
    called, because its parent computes with its parameters itself as attention does, is a part of its parent.

    Args:
        loss: runs a forward of `samples` samples. The multiply-adds are those of one sample. Of normalisations and
            activations none are counted.
    """
    counter = FlopCounterMode(display=False)
    # The operations of each module, without those of its children.
    reached: dict[nn.Module, int] = {network: 0}
    running: list[tuple[nn.Module, int]] = []  # the modules whose forward is under way, and all operations before it

    def begin(module: nn.Module, _) -> None:
        reached.setdefault(module, 0)
        running.append((module, counter.get_total_flops()))

    def end(module: nn.Module, *_) -> None:
        _, before = running.pop()
        spent = counter.get_total_flops() - before
        reached[module] += spent
        if running:
            parent, _ = running[-1]
            reached[parent] -= spent

    hooks = []
    for module in network.modules():
        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(end))
    # A fused attention, which the counter does not know of every device, multiplies what its parts multiply.
    with sdpa_kernel(SDPBackend.MATH), time_steps_apart(), counter:
        loss()
    for hook in hooks:
        hook.remove()
    parameters = _parameters(network, reached)
    layers = []
    for module, operations in reached.items():
        # A multiplication and an addition are two operations.
        layer = Layer(parameters[module], operations // (2 * samples))
        if any(layer):
            layers.append(layer)
    of_loss = counter.get_total_flops() - sum(reached.values())
    if of_loss:
        layers.append(Layer(0, of_loss // (2 * samples)))
    return tuple(layers)


@contextmanager
def time_steps_apart() -> Iterator[None]:
    """Run an LSTM step by step in time, as an RNN and a GRU run.

    On a CPU oneDNN may run a layer of an LSTM as one operator, for which FlopCounterMode has no formula.
    """
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def _parameters(network: nn.Module, reached: Container[nn.Module]) -> dict[nn.Module, int]:
    """The number of parameters of each module, with those of its children whose forward is not called.

    A parameter that several modules share is the first one's.
    """
    counted: set[nn.Parameter] = set()
    found: dict[nn.Module, int] = {}

    def add(module: nn.Module, owner: nn.Module) -> None:
        own = set(module.parameters(recurse=False)) - counted
        counted.update(own)
        trained = [parameter.numel() for parameter in own if parameter.requires_grad]
        found[owner] = found.get(owner, 0) + sum(trained)
        for child in module.children():
            add(child, child if child in reached else owner)

    add(network, network)
    return found


class StepCount(NamedTuple):
    """The operators of a training step, and the bytes that they read and write."""

    operators: int
    bytes: int


class _Count(TorchDispatchMode):
    """Counts operators that compute: a view of a tensor starts no kernel, and what NO_KERNEL names none either."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if not function.is_view and _name(function) not in NO_KERNEL:
            self.operators += 1
            for leaf in flat((arguments, keywords or {}, result)):
                if isinstance(leaf, Tensor):
                    self.bytes += leaf.nbytes
        return result


def _name(function: torch._ops.OpOverload) -> str:
    return f"{function.namespace}.{function.overloadpacket.__name__}"


def count_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> StepCount:
    """What forward, backward and a step of the optimizer run: each operator starts about one kernel on a GPU.

    Attention is one operator, as on a GPU.
    """
    with _Count() as count:
        training_step(optimizer, loss)
    return StepCount(count.operators, count.bytes)


def training_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    with FusedAttention(), time_steps_apart():
        loss().backward()
    optimizer.step()
