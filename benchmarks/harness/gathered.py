"""Gathered parameters of FSDP, as the accounting of memory sees them."""

from typing import Any

from torch import nn

from common.memory import name_category


def name_gathered(unit: nn.Module, _: Any) -> None:
    """Say for the accounting which tensors are gathered parameters: a hook for after FSDP's own, which gathers."""
    for parameter in unit.parameters():
        if not hasattr(parameter, "device_mesh"):  # another unit's are still cut
            name_category(parameter, "parameters")
