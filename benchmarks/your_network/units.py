"""The units of a network: the parts that FSDP gathers, or activation checkpointing computes again, one at a time."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from benchmarks.your_network.errors import StepFailed

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units(model: nn.Module) -> list[nn.Module]:
    """The largest parts that repeat. A block is a module that has children; a layer is one that has none.

    - `self.blocks = ModuleList([Block(), Block()])`: each element of a container is a unit.
    - `self.stages = Sequential(Sequential(Block(), Block()), Block())`: a container of blocks is opened. This has 3.
    - `self.features = Sequential(Conv2d(…), ReLU(), Conv2d(…))`: a chain of layers is one unit, as in VGG. If each
      layer were one, checkpointing would keep the input of each layer, and save nothing.

    The elements of a network that is a container itself are units, too. A part without parameters is none, and modules
    inside a unit belong to it.
    """
    found = []
    for child in model.children():
        # An attribute that is another container than a Sequential has no forward that could be computed again.
        is_element_or_chain = type(model) in _CONTAINERS or type(child) is nn.Sequential
        if is_element_or_chain and not _contains_blocks(child):
            if list(child.parameters()):
                found.append(child)
        else:
            found += units(child)
    return found


def _contains_blocks(module: nn.Module) -> bool:
    if type(module) not in _CONTAINERS:
        return False
    return any(list(element.children()) for element in module.children())


def checkpointed(model: nn.Module) -> nn.Module:
    """`model`, whose units keep their inputs only, and compute again in backward. Raises StepFailed if it has none."""
    chosen = set(units(model))
    if not chosen:
        raise StepFailed("--checkpointing computes the elements of containers again, and the network has no container")
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in chosen:
                setattr(parent, name, checkpoint_wrapper(child))
    return model
