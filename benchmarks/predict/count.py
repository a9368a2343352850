"""Counts the networks that predictions are made for, layer by layer, from their modules.

    python -m benchmarks.predict.count

writes networks.json anew. Nothing is computed: the networks are on torch's meta device. This needs torchvision.
"""

import argparse
import json
from collections.abc import Callable, Container
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from benchmarks.predict.networks import PATH
from benchmarks.predict.step import Layer, Network
from common.model import BasicNet

BERT_LAYERS = 24
BERT_TOKENS = 128  # of a sequence
EXAMPLES = 2  # a batch normalisation needs more than one


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


def images(channels: int, side: int) -> Tensor:
    """A batch of square images."""
    return torch.zeros(EXAMPLES, channels, side, side)


def sequences() -> Tensor:
    """A batch of tokens."""
    return torch.zeros(EXAMPLES, BERT_TOKENS, dtype=torch.long)


def inception() -> nn.Module:
    """Inception V3 without the auxiliary classifier, as tf_cnn_benchmarks trains it, which published figures use."""
    return models.inception_v3(aux_logits=False, init_weights=False)


class Source(NamedTuple):
    """The functions that make a network and a batch for it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


SOURCES = {
    "BasicNet": Source(BasicNet, partial(images, 1, 28)),
    "ResNet-50": Source(models.resnet50, partial(images, 3, 224)),
    "ResNet-101": Source(models.resnet101, partial(images, 3, 224)),
    "Inception V3": Source(inception, partial(images, 3, 299)),
    "VGG-16": Source(models.vgg16, partial(images, 3, 224)),
    "BERT-large": Source(BertLarge, sequences),
}


def count_all() -> dict[str, Network]:
    """All networks, counted from their modules: this takes a minute or two."""
    return {name: count(name) for name in SOURCES}


def count(name: str) -> Network:
    """A network by its layers and operators. KeyError is raised if SOURCES does not have it."""
    source = SOURCES[name]
    with torch.device("meta"):
        module = source.build()
        inputs = source.inputs()
        return Network(name, count_layers(module, inputs), count_operators(module, inputs))


def count_layers(network: nn.Module, inputs: Tensor) -> tuple[Layer, ...]:
    """The modules that have parameters or multiply, in the order in which forward reaches them.

    What a module's forward multiplies belongs to it, but for what it lets its children do. A child whose forward is not
    called, because its parent computes with its parameters itself as attention does, is a part of its parent.

    Args:
        inputs: some samples; the multiply-adds are those of one. Of normalisations and activations none are counted.
    """
    counter = FlopCounterMode(display=False)
    reached: dict[nn.Module, int] = {}  # the operations of each module, without those of its children
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

    for module in network.modules():
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    with counter:
        network(inputs)
    parameters = {module: own_parameters(module, reached) for module in reached}
    layers = []
    for module, operations in reached.items():
        # A multiplication and an addition are two operations.
        layer = Layer(parameters[module], operations // (2 * len(inputs)))
        if any(layer):
            layers.append(layer)
    return tuple(layers)


def own_parameters(module: nn.Module, reached: Container[nn.Module]) -> int:
    """The number of parameters that a module has itself or in children whose forward is not called."""
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return own + sum(own_parameters(child, reached) for child in module.children() if child not in reached)


class _Count(TorchDispatchMode):
    """Counts operators that compute: a view of a tensor starts no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if not function.is_view:
            self.operators += 1
        return function(*arguments, **(keywords or {}))


def count_operators(network: nn.Module, inputs: Tensor) -> int:
    """The operators that forward, backward and a step of AdamW run: each starts about one kernel on a GPU."""
    optimizer = torch.optim.AdamW(network.parameters(), foreach=True)
    # The first step also makes the optimizer's state.
    _training_step(network, inputs, optimizer)
    with _Count() as count:
        _training_step(network, inputs, optimizer)
    return count.operators


def _training_step(network: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    network(inputs).sum().backward()
    optimizer.step()


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.predict.count", description=__doc__.splitlines()[0]).parse_args()
    lines = []
    for name, network in count_all().items():
        content = {"operators": network.operators, "layers": network.layers}
        lines.append(f"{json.dumps(name)}: {json.dumps(content)}")
    joined = ",\n".join(lines)
    PATH.write_text(f"{{\n{joined}\n}}\n")


if __name__ == "__main__":
    main()
