"""SPEC: how somebody names a network of their own, and a batch, a loss and an optimizer for it.

    torchvision:resnet50        any name of torchvision's registry; random weights, nothing is fetched
    my_file.py:build            a function of yours that returns a module

Beside `build` the file may have `batch(n)`, which returns inputs and targets, `loss(outputs, targets)`, by default the
cross-entropy, and `optimizer(parameters)`, by default AdamW. Inputs may be a tensor, a tuple of arguments of the
module or a dict of named ones; targets may be nested as you like. What all samples share, such as a causal mask, is a
buffer of the module.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.hollow import hollow
from common.errors import fail

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
IMAGE = (3, 224, 224)
AUXILIARY_WEIGHT = 0.4  # of Inception's second loss. Source: Szegedy et al., 2014, has 0.3 for GoogLeNet's
_OTHER_TARGETS = ("rcnn", "retinanet", "fcos", "ssd", "keypoint", "raft")


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
    optimizer: Callable[..., torch.optim.Optimizer]


def call(model: nn.Module, inputs: Any) -> Any:
    """The outputs of `model`: a tuple are its arguments, a dict its named ones, everything else is the only one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def load(text: str, shape: tuple[int, ...] | None = None, optimizer: str = "adamw") -> UserNetwork:
    """The network that SPEC names.

    Args:
        text: SPEC.
        shape: of a sample, for a network of torchvision and for a file without `batch`. None: IMAGE.
        optimizer: a key of OPTIMIZERS, unless the file has an `optimizer`.

    Raises:
        UserError: where there is no such network, or no batch for it.
    """
    source, _, name = text.rpartition(":")
    if not source or not name:
        fail(f"{text!r} names no network: write torchvision:NAME, or FILE.py:FUNCTION")
    if source == "torchvision":
        build = _of_torchvision(name)
        return UserNetwork(
            name, build, _batch_of_shape(shape or IMAGE, build), classification_loss, OPTIMIZERS[optimizer]
        )
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
        batch=batch or _batch_of_shape(shape or IMAGE, build),
        loss=getattr(module, "loss", classification_loss),
        optimizer=getattr(module, "optimizer", OPTIMIZERS[optimizer]),
    )


def _of_torchvision(name: str) -> Callable[[], nn.Module]:
    from torchvision import models

    if name not in models.list_models():
        fail(f"torchvision has no network {name!r}; `torchvision.models.list_models()` lists those that it has")
    if name.startswith("quantized_"):
        fail(f"{name} is quantized, and cannot be trained")
    if any(word in name for word in _OTHER_TARGETS):
        fail(f"{name} is trained with boxes or flows, not with classes: write a file with build, batch and loss")
    without_download = {"weights": None}
    if models.get_model_builder(name).__module__.startswith("torchvision.models.segmentation"):
        without_download["weights_backbone"] = None
    return lambda: models.get_model(name, **without_download)


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
        fail(f"{path} cannot be imported: {type(error).__name__}: {error}")
    return module


def _batch_of_shape(shape: tuple[int, ...], build: Callable[[], nn.Module]) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Noise of a shape, with classes that fit the output of the network: one for each sample, or for each pixel."""

    @torch.no_grad()
    def logits_of_one() -> Tensor:
        model = build().eval()
        return main_output(model(torch.zeros(1, *shape)))

    @functools.cache
    def target_shape() -> torch.Size:
        with hollow():
            return logits_of_one().shape[2:]

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, *shape), torch.zeros(n, *target_shape(), dtype=torch.long)

    return batch


def main_output(outputs: Any) -> Any:
    """The logits of a network that may have auxiliary ones."""
    if isinstance(outputs, dict) and "out" in outputs:
        return outputs["out"]
    return outputs[0] if isinstance(outputs, tuple) else outputs


def classification_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The cross-entropy; of outputs with auxiliary logits the weighted sum, as torchvision's networks are trained."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, targets)
    main = main_output(outputs)
    if not isinstance(main, Tensor):
        raise TypeError(f"the network returns a {type(main).__name__} and no tensor: write loss(outputs, targets)")
    of_main = F.cross_entropy(main, targets)
    logits = outputs.values() if isinstance(outputs, dict) else outputs
    others = [output for output in logits if isinstance(output, Tensor) and output is not main]
    return of_main + AUXILIARY_WEIGHT * sum(F.cross_entropy(output, targets) for output in others)
