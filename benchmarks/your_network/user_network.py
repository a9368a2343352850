"""A network of somebody's own: how SPEC names it, and the parts of its training step.

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
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.your_network.errors import described, failing_as
from benchmarks.your_network.units import checkpoint_units
from common.errors import fail

IMAGE = (3, 224, 224)
SMALLEST_BATCH = 2  # a batch normalisation needs more than one sample


@dataclass(frozen=True)
class UserNetwork:
    """A network, and the parts of its training step, each of which raises StepFailed if the user's code fails.

    Attributes:
        title: the name in the tables.
        build: makes the module.
        batch: makes the inputs and targets of `n` samples, as `batch(n)`.
        loss: takes outputs and targets, and returns a scalar.
        optimizer: takes the parameters.
        autocast: the dtype of mixed precision, or None.
        checkpointing: each of the `units` keeps its inputs only, and computes again in backward.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None
    checkpointing: bool = False

    def make_model(self) -> nn.Module:
        """The module, on the CPU and in training mode. It has a parameter to train."""
        with failing_as(f"{self.title} cannot be built"):
            model = self.build()
            if not isinstance(model, nn.Module):
                raise TypeError(f"it returns a {type(model).__name__}, not a module")
            if not trainable(model):
                raise ValueError("it has no parameter to train")
            model.train().to("cpu")  # the accounting of memory takes what is moved to be on the device
        return checkpoint_units(model) if self.checkpointing else model

    def make_batch(self, samples: int) -> tuple[Any, Any]:
        """The inputs and targets of so many samples, on the CPU."""
        with failing_as(f"a batch of {samples} cannot be made"):
            batch = self.batch(samples)
            inputs, _ = batch
            for leaf in tree_iter(inputs):
                # It may be a multiple, as where the words of all texts lie one behind the other.
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] % samples:
                    reason = "should be the sample; what all samples share can be a buffer of the module"
                    raise ValueError(f"the first dimension of an input of shape {tuple(leaf.shape)} {reason}")
            return tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), batch)

    def compute_loss(self, model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
        """The loss of a batch, a scalar. `model` may be wrapped, and lies where the batch does."""
        inputs, targets = batch
        device = next(model.parameters()).device
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            with failing_as(f"the forward of {self.title} failed"):
                outputs = _call(model, inputs)
            with failing_as(f"the loss of {self.title} failed"):
                loss = self.loss(outputs, targets)
                if not isinstance(loss, Tensor) or loss.dim() != 0:
                    raise TypeError(f"it must be a scalar tensor, not {getattr(loss, 'shape', loss)}")
        return loss

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer for all trainable parameters of `model`, which may be wrapped."""
        with failing_as(f"the optimizer of {self.title} cannot be made"):
            optimizer = self.optimizer(trainable(model))
            use_foreach(optimizer)
            return optimizer

    def take_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, Any]) -> None:
        """Train `model`, which may be wrapped, with a batch that lies where it does."""
        loss = self.compute_loss(model, batch)
        with failing_as(f"the backward of {self.title} failed"):
            loss.backward()
        with failing_as(f"the optimizer of {self.title} failed"):
            optimizer.step()
        optimizer.zero_grad()


def _call(model: nn.Module, inputs: Any) -> Any:
    """The outputs of `model`: a tuple are its arguments, a dict its named ones, everything else is the only one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take all parameters at once, as torch's do on a GPU, unless its maker chose otherwise."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def load(spec: str, shape: tuple[int, ...] | None = None) -> UserNetwork:
    """The network that SPEC names.

    Args:
        spec: SPEC.
        shape: of a sample, for a network of torchvision and for a file without `batch`. None: IMAGE.

    Raises:
        UserError: where there is no such network, or no batch for it.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        fail(f"{spec!r} names no network: write torchvision:NAME, or FILE.py:FUNCTION")
    if source == "torchvision":
        return UserNetwork(name, _torchvision_builder(name), partial(noise, shape=shape or IMAGE), classification_loss)
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
