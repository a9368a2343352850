"""Counts the networks that predictions are made for, layer by layer, from their modules.

    python -m benchmarks.predict.count

writes networks.json anew. Nothing is computed (see `hollow`). This needs torchvision.
"""

import argparse
import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from benchmarks.harness.fused_attention import FusedAttention
from benchmarks.harness.hollow import hollow
from benchmarks.predict.networks import PATH
from benchmarks.predict.step import Layer, Network
from common.model import BasicNet

BERT_LAYERS = 24
BERT_TOKENS = 128  # of a sequence
EXAMPLES = 2  # a batch normalisation needs more than one
# Operators of torch that multiply as much as products of matrices do, and for which FlopCounterMode has no formula.
WITHOUT_FORMULA = {
    "aten._cdist_forward",
    "aten._fft_c2c",
    "aten._fft_c2r",
    "aten._fft_r2c",
    "aten._grouped_mm",
    "aten._int_mm",
    "aten._linalg_eigh",
    "aten._linalg_slogdet",
    "aten._linalg_solve_ex",
    "aten._linalg_svd",
    "aten._sparse_addmm",
    "aten._trilinear",
    "aten.addmv",
    "aten.addr",
    "aten.conv_tbc",
    "aten.dot",
    "aten.linalg_cholesky_ex",
    "aten.linalg_eig",
    "aten.linalg_inv_ex",
    "aten.linalg_lu_factor_ex",
    "aten.linalg_matrix_exp",
    "aten.linalg_qr",
    "aten.linalg_solve_triangular",
    "aten.mkldnn_rnn_layer",
    "aten.mv",
    "aten.triangular_solve",
    "aten.vdot",
}
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
# The namespaces of operators that torch itself calls. The formulas of others' operators are not known.
OF_TORCH = {"_c10d_functional", "aten", "c10d", "inductor", "prim", "prims", "profiler"}


class Block(nn.Module):
    """A transformer's layer of BERT-large's width: attention, then two linear layers."""

    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.attention = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.attention(hidden).unflatten(2, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
        hidden = self.attention_norm(hidden + self.output(attended))
        wide = F.gelu(self.widen(hidden))
        return self.norm(hidden + self.narrow(wide))


class BertLarge(nn.Module):
    """As many parameters as BERT-large has without the heads for its tasks. Source: Devlin et al., NAACL 2019."""

    def __init__(self) -> None:
        super().__init__()
        words, positions, segments = 30_522, 512, 2
        self.embedding = nn.Embedding(words + positions + segments, 1024)
        self.norm = nn.LayerNorm(1024)
        blocks = [Block() for _ in range(BERT_LAYERS)]
        self.blocks = nn.Sequential(*blocks)
        self.pooler = nn.Linear(1024, 1024)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.norm(self.embedding(tokens)))
        return self.pooler(hidden[:, 0])


def images(channels: int, side: int, count: int) -> tuple[Tensor, Tensor]:
    """A batch of square images, and their classes."""
    return torch.zeros(count, channels, side, side), torch.zeros(count, dtype=torch.long)


def sequences(count: int) -> tuple[Tensor, None]:
    """A batch of tokens."""
    return torch.zeros(count, BERT_TOKENS, dtype=torch.long), None


def mean_output(outputs: Tensor, _: None) -> Tensor:
    """A number that depends on all that BERT has without the heads for its tasks."""
    return outputs.mean()


def inception() -> nn.Module:
    """Inception V3 without the auxiliary classifier, as tf_cnn_benchmarks trains it, which published figures use."""
    return models.inception_v3(aux_logits=False, init_weights=False)


class Source(NamedTuple):
    """The functions that make a network and the inputs and targets of so many samples, and that compute the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor | None]]
    loss: Callable[..., Tensor] = F.cross_entropy


SOURCES = {
    "BasicNet": Source(BasicNet, partial(images, 1, 28), F.nll_loss),
    "ResNet-50": Source(models.resnet50, partial(images, 3, 224)),
    "ResNet-101": Source(models.resnet101, partial(images, 3, 224)),
    "Inception V3": Source(inception, partial(images, 3, 299)),
    "VGG-16": Source(models.vgg16, partial(images, 3, 224)),
    "BERT-large": Source(BertLarge, sequences, mean_output),
}


def count_all() -> dict[str, Network]:
    """All networks, counted from their modules: this takes a minute or two."""
    return {name: count(name) for name in SOURCES}


def count(name: str) -> Network:
    """A network by its layers and operators. KeyError is raised if SOURCES does not have it."""
    source = SOURCES[name]
    with hollow():
        module = source.build()
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)

        def loss(batch: tuple[Tensor, Tensor | None]) -> Tensor:
            inputs, targets = batch
            return source.loss(module(inputs), targets)

        return count_network(name, module, optimizer, source.batch, loss)


def count_network(
    name: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], Any],
    loss: Callable[[Any], Tensor],
    samples: int = EXAMPLES,
) -> Network:
    """Any network by its layers, its operators and the bytes that these move.

    Args:
        batch: makes a batch of so many samples.
        loss: of such a batch.
        samples: the batch that is counted, and divided among its samples. A small one will do, unless a sample
            multiplies more in a large batch, as where each is compared with each.
    """
    layers = count_layers(module, partial(loss, batch(samples)), samples)
    step_of_few = count_step(optimizer, partial(loss, batch(EXAMPLES)))
    more = max(samples, 2 * EXAMPLES)
    step_of_more = count_step(optimizer, partial(loss, batch(more)))
    # What does not depend on the batch, such as the optimizer's bytes, cancels.
    bytes_of_a_sample = (step_of_more.bytes - step_of_few.bytes) // (more - EXAMPLES)
    return Network(name, layers, step_of_few.operators, bytes_of_a_sample)


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


class _WithoutFormula(TorchDispatchMode):
    """Keeps the names of the operators that multiply and cannot be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace not in OF_TORCH or _name(function) in WITHOUT_FORMULA:
            self.names.add(_name(function))
        return function(*arguments, **(keywords or {}))


def operators_without_formula(loss: Callable[[], Tensor]) -> list[str]:
    """The names of the forward's operators whose multiply-adds `count_layers` leaves out."""
    with time_steps_apart(), _WithoutFormula() as found:
        loss()
    return sorted(found.names)


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
            for leaf in tree_iter((arguments, keywords, result)):
                if isinstance(leaf, Tensor):
                    self.bytes += leaf.nbytes
        return result


def _name(function: torch._ops.OpOverload) -> str:
    return f"{function.namespace}.{function.overloadpacket.__name__}"


def count_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> StepCount:
    """What forward, backward and a step of the optimizer run: each operator starts about one kernel on a GPU.

    Attention is one operator, as on a GPU, except on the meta device, for which torch has none that is fused.
    """
    # The first step also makes the optimizer's state.
    _training_step(optimizer, loss)
    with _Count() as count:
        _training_step(optimizer, loss)
    return StepCount(count.operators, count.bytes)


def _training_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    with FusedAttention(), time_steps_apart():
        loss().backward()
    # Older releases of torch make AdamW's count of steps on the default device, and read it. On "meta" it has no value.
    with torch.device("cpu"):
        optimizer.step()


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.predict.count", description=__doc__.splitlines()[0]).parse_args()
    lines = []
    for name, network in count_all().items():
        content = {
            "operators": network.operators,
            "bytes_of_a_sample": network.bytes_of_a_sample,
            "layers": network.layers,
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(content)}")
    joined = ",\n".join(lines)
    PATH.write_text(f"{{\n{joined}\n}}\n")


if __name__ == "__main__":
    main()
