"""The multiply-adds, gradients, operators and bytes of a user's network, counted `without_computing`."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.your_network.errors import StepFailed, failing_as
from benchmarks.your_network.user_network import SMALLEST_BATCH, UserNetwork, trainable, use_foreach
from benchmarks.your_network.without_computing import makes_view, without_computing


class Gradient(NamedTuple):
    """A parameter tensor's numbers, and the multiply-adds that backward has done when its gradient is there."""

    parameters: int
    done: int


@dataclass(frozen=True)
class NetworkCosts:
    """The costs of a network's training step, all that a prediction knows of it.

    Attributes:
        gradients: in the order in which backward computes them.
        multiply_adds: of the forward of one sample.
        operators: how many one training step runs.
        bytes_of_a_sample: by how many bytes more these operators read and write for each sample of the batch.
    """

    name: str
    gradients: tuple[Gradient, ...]
    multiply_adds: int
    operators: int
    bytes_of_a_sample: int

    @property
    def parameters(self) -> int:
        return sum(gradient.parameters for gradient in self.gradients)


@without_computing()
def count(network: UserNetwork, batch: int) -> NetworkCosts:
    """The costs of a network, for a `batch` on each GPU.

    Raises:
        StepFailed: if a step of the network fails, multiplies nothing, is recurrent, or leaves a gradient out.
    """
    model = network.make_model()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        # On a GPU an RNN, GRU or LSTM is one operator of torch, and cuDNN does not publish how many kernels it runs.
        raise StepFailed(f"{network.title} has recurrent layers, and no source says how long they take on a GPU")
    optimizer = network.make_optimizer(model)
    use_foreach(optimizer)
    with failing_as(f"a step of {network.title} failed"):
        # A sample may multiply more in a larger batch, for example if each is compared with each.
        multiply_adds, gradients = count_products(network, model, max(batch, SMALLEST_BATCH))
        optimizer.step()  # the first one also makes its state
        optimizer.zero_grad()
        # Two batches are counted, so that the bytes which do not depend on the batch, such as the optimizer's, cancel.
        few = count_step(network, model, optimizer, SMALLEST_BATCH)
        more_samples = max(batch, 2 * SMALLEST_BATCH)
        more = count_step(network, model, optimizer, more_samples)
    unused = len(trainable(model)) - len(gradients)
    if unused:
        raise StepFailed(f"{unused} parameters of {network.title} get no gradient, and DDP refuses that")
    if not multiply_adds:
        raise StepFailed(f"{network.title} multiplies nothing that is counted, so no time can be predicted")
    bytes_of_a_sample = (more.bytes - few.bytes) // (more_samples - SMALLEST_BATCH)
    return NetworkCosts(network.title, gradients, multiply_adds, few.operators, bytes_of_a_sample)


def count_products(network: UserNetwork, model: nn.Module, samples: int) -> tuple[int, tuple[Gradient, ...]]:
    """The multiply-adds of a forward for one of its `samples`, and the gradients in the order of backward.

    The operations of normalisations and activations are not counted.
    """
    batch = network.make_batch(samples)
    forward = FlopCounterMode(display=False)
    backward = FlopCounterMode(display=False)
    flops_per_multiply_add = 2
    gradients: list[Gradient] = []

    def record_gradient(parameter: nn.Parameter) -> None:
        done = backward.get_total_flops() // flops_per_multiply_add // samples
        gradients.append(Gradient(parameter.numel(), done))

    hooks = [parameter.register_post_accumulate_grad_hook(record_gradient) for parameter in trainable(model)]
    # A fused attention, which the counter does not know of every device, multiplies what its parts multiply.
    with sdpa_kernel(SDPBackend.MATH):
        with forward:
            loss = network.compute_loss(model, batch)
        with backward:
            loss.backward()
    for hook in hooks:
        hook.remove()
    multiply_adds = forward.get_total_flops() // flops_per_multiply_add // samples
    return multiply_adds, tuple(gradients)


# Operators that start no kernel: they allocate a tensor, read a number, or mark a place in a profile.
WITHOUT_KERNEL = {
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


class StepCount(TorchDispatchMode):
    """Counts the operators that start a kernel, and the bytes that they read and write.

    Views start none. Nor does reading a number from the host, as AdamW does with each parameter's step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        name = f"{function.namespace}.{function.overloadpacket.__name__}"
        if name not in WITHOUT_KERNEL and not makes_view(function):
            self.operators += 1
            for leaf in tree_iter((arguments, keywords or {}, result)):
                if isinstance(leaf, Tensor):
                    self.bytes += leaf.nbytes
        return result


def count_step(network: UserNetwork, model: nn.Module, optimizer: torch.optim.Optimizer, samples: int) -> StepCount:
    """The operators of forward, backward and a step of the optimizer: each starts about one kernel on a GPU.

    Attention is one operator, as on a GPU.
    """
    batch = network.make_batch(samples)
    with StepCount() as counted:
        network.take_step(model, optimizer, batch)
    return counted
