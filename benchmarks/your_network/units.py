"""The units of a network: the parts that FSDP gathers, or activation checkpointing computes again, one at a time."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units(model: nn.Module) -> list[nn.Module]:
    """The elements of each Sequential, ModuleList and ModuleDict, if they have parameters.

    An element that contains blocks is opened, and they are the units. A chain of single layers, as a U-Net has them, is
    one unit: if each layer were one, checkpointing would keep the input of each layer, and save nothing. Modules inside
    a unit belong to it.
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
