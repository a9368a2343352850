"""SPEC, by which a command line names a network of somebody's own:

    torchvision:resnet50        any classification network of torchvision; random weights, nothing is fetched
    my_file.py:build            a function of yours that returns a module

Beside `build` the file may have `batch(n)`, which returns inputs and targets, `loss(outputs, targets)`, by default the
cross-entropy, and `optimizer(parameters)`, by default AdamW. Inputs may be a tensor, a tuple of arguments of the
module or a dict of named ones; targets may be nested as you like. A tensor that all samples share, such as a causal
mask, is a buffer of the module.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.your_network.errors import described
from benchmarks.your_network.user_network import UserNetwork
from common.errors import fail

IMAGE = (3, 224, 224)


def load(spec: str, shape: tuple[int, ...] | None = None) -> UserNetwork:
    """The network that SPEC names. `shape`, or IMAGE, is that of a sample where no function `batch` makes it.

    Raises:
        UserError: where there is no such network, or no batch for it.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        fail(f"{spec!r} names no network: write torchvision:NAME, or FILE.py:FUNCTION")
    batch = partial(noise, shape=shape or IMAGE)
    if source == "torchvision":
        return UserNetwork(name, _torchvision_builder(name), batch, classification_loss)
    path = Path(source)
    module = _imported(path)
    build = getattr(module, name, None)
    if not callable(build):
        fail(f"{path} has no function {name!r}")
    network = UserNetwork(
        f"{path.stem}:{name}",
        build,
        batch=_function(module, "batch", default=batch),
        loss=_function(module, "loss", default=classification_loss),
        optimizer=_function(module, "optimizer", default=torch.optim.AdamW),
    )
    if shape and network.batch is not batch:
        fail(f"--input: {path} has a function 'batch', which says what a sample is")
    return network


def _function(module: Any, name: str, default: Any) -> Any:
    found = getattr(module, name, None)
    if found is None:
        return default
    if not callable(found):
        fail(f"{module.__file__} has {name!r}, which is not a function: give it another name")
    return found


def _torchvision_builder(name: str) -> Callable[[], nn.Module]:
    from torchvision import models

    if name not in models.list_models(module=models):  # the module has those for classification
        lists = "`torchvision.models.list_models(module=torchvision.models)` lists them"
        fail(f"torchvision has no classification network {name!r}; {lists}")
    return partial(models.get_model, name, weights=None)


@cache
def _imported(path: Path) -> Any:
    """The module in a file, as if it was run: it may import what lies beside it. A process runs it once."""
    if path.suffix != ".py" or not path.is_file():
        fail(f"there is no Python file {path}")
    spec = importlib.util.spec_from_file_location(f"network_in_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks there for annotations that are texts
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        fail(f"{path} cannot be imported: {described(error)}")
    return module


def noise(n: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`n` samples of a shape, and a class of each."""
    return torch.randn(n, *shape), torch.zeros(n, dtype=torch.long)


def classification_loss(logits: Any, targets: Tensor) -> Tensor:
    if not isinstance(logits, Tensor):
        raise TypeError(f"the network returns a {type(logits).__name__} and no tensor: write loss(outputs, targets)")
    return F.cross_entropy(logits, targets)
