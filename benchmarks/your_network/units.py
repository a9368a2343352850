"""The units of a network: the parts that FSDP gathers, or activation checkpointing computes again, one at a time."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units(model: nn.Module) -> list[nn.Module]:
    """The elements of each Sequential, ModuleList and ModuleDict, as far as they have parameters.

    An element that is a container of such elements itself is opened. One that chains single layers is a block, as a
    U-Net's are, and stays whole: to keep each layer's input would save nothing. What lies deeper belongs to it.
    """
    found = []
    for child in model.children():
        if type(model) in _CONTAINERS and not _contains_blocks(child):
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
    """`model`, whose units keep their inputs only and compute again in backward."""
    chosen = set(units(model))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in chosen:
                setattr(parent, name, checkpoint_wrapper(child))
    return model
