"""The units of a network: the parts that FSDP gathers, or activation checkpointing computes again, one at a time."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from benchmarks.your_network.errors import StepFailed

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units(model: nn.Module) -> Iterator[nn.Module]:
    """The units of a network. One that two parents have is there twice.

    A unit is an element of a container, or a Sequential of layers without children of their own; it has parameters. A
    container of blocks is no unit: its elements are. What lies inside a unit belongs to it.

    - `self.blocks = ModuleList([Block(), Block()])`: each block is a unit.
    - `self.features = Sequential(Conv2d(…), ReLU(), Conv2d(…))`: a chain of layers is one unit, as in VGG.
    """
    is_container = type(model) in _CONTAINERS
    for child in model.children():
        is_chain = type(child) is nn.Sequential  # the only container with a forward that could be computed again
        has_parameters = bool(list(child.parameters()))
        if (is_container or is_chain) and not _contains_blocks(child) and has_parameters:
            yield child
        else:
            yield from units(child)


def _contains_blocks(module: nn.Module) -> bool:
    if type(module) not in _CONTAINERS:
        return False
    return any(list(element.children()) for element in module.children())


def checkpoint_units(model: nn.Module) -> nn.Module:
    """`model`, whose units keep their inputs only, and compute again in backward. Raises StepFailed if it has none."""
    chosen = set(units(model))
    if not chosen:
        raise StepFailed("--checkpointing computes the elements of containers again, and the network has no container")
    # The list is made before any is wrapped, so no unit is wrapped twice, even if two parents have it.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in chosen:
            model.set_submodule(name, checkpoint_wrapper(module))
    return model
