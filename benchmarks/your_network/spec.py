"""SPEC: how somebody names a network of their own, and a batch, a loss and an optimizer for it.

    torchvision:resnet50        any classification network of torchvision; random weights, nothing is fetched
    my_file.py:build            a function of yours that returns a module

Beside `build` the file may have `batch(n)`, which returns inputs and targets, `loss(outputs, targets)`, by default the
cross-entropy, and `optimizer(parameters)`, by default AdamW. Inputs may be a tensor, a tuple of arguments of the
module or a dict of named ones; targets may be nested as you like. What all samples share, such as a causal mask, is a
buffer of the module.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.your_network.errors import described
from common.errors import fail

IMAGE = (3, 224, 224)


@dataclass(frozen=True)
class UserNetwork:
    """A network, and what a training of it needs.

    Attributes:
        title: for tables.
        build: makes the module, on the CPU.
        batch: `batch(n)` makes the inputs and targets of n samples.
        loss: of outputs and targets, a scalar.
        optimizer: of the parameters.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def call(model: nn.Module, inputs: Any) -> Any:
    """The outputs of `model`: a tuple are its arguments, a dict its named ones, everything else is the only one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def load(text: str, shape: tuple[int, ...] | None = None) -> UserNetwork:
    """The network that SPEC names.

    Args:
        text: SPEC.
        shape: of a sample, for a network of torchvision and for a file without `batch`. None: IMAGE.

    Raises:
        UserError: where there is no such network, or no batch for it.
    """
    source, _, name = text.rpartition(":")
    if not source or not name:
        fail(f"{text!r} names no network: write torchvision:NAME, or FILE.py:FUNCTION")
    if source == "torchvision":
        return UserNetwork(name, _of_torchvision(name), partial(noise, shape=shape or IMAGE), classification_loss)
    path = Path(source)
    module = _imported(path)
    build = getattr(module, name, None)
    if not callable(build):
        fail(f"{path} has no function {name!r}")
    batch = getattr(module, "batch", None)
    if batch and shape:
        fail(f"--input: {path} has a function 'batch', which says what a sample is")
    return UserNetwork(
        title=f"{path.stem}:{name}",
        build=build,
        batch=batch or partial(noise, shape=shape or IMAGE),
        loss=getattr(module, "loss", classification_loss),
        optimizer=getattr(module, "optimizer", torch.optim.AdamW),
    )


def _of_torchvision(name: str) -> Callable[[], nn.Module]:
    from torchvision import models

    if name not in models.list_models(module=models):  # the module has those for classification
        lists = "`torchvision.models.list_models(module=torchvision.models)` lists them"
        fail(f"torchvision has no classification network {name!r}; {lists}")
    return partial(models.get_model, name, weights=None)


def _imported(path: Path) -> Any:
    """The module in a file, as if it was run: it may import what lies beside it."""
    if not path.is_file():
        fail(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"network_in_{path.stem}", path)
    if spec is None or spec.loader is None:
        fail(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass with annotations that are texts looks for it
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        fail(f"{path} cannot be imported: {described(error)}")
    return module


def noise(n: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`n` samples of a shape, and a class of each."""
    return torch.randn(n, *shape), torch.zeros(n, dtype=torch.long)


def classification_loss(logits: Any, targets: Tensor) -> Tensor:
    if not isinstance(logits, Tensor):
        raise TypeError(f"the network returns a {type(logits).__name__} and no tensor: write loss(outputs, targets)")
    return F.cross_entropy(logits, targets)
