"""Tensors of a network: the identities of its parameters, how ranks share them out, and some of their numbers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from common.doctor.record import NUMBERS_OF_A_TENSOR, Tensors


def identities(module: nn.Module) -> dict[str, tuple]:
    """The id, device and dtype of each parameter that DDP averages, which must not change."""
    averaged = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {name: (id(parameter), str(parameter.device), str(parameter.dtype)) for name, parameter in averaged}


def is_part(name: str, parameter: nn.Parameter) -> bool:
    """True if this rank holds a part of the parameter only, as FSDP2 and FSDP1 leave it."""
    return isinstance(parameter, DTensor) or "_fsdp_wrapped_module" in name


def shapes(module: nn.Module) -> dict[str, tuple]:
    return {name: tuple(part.shape) for name, part in module.named_parameters() if not is_part(name, part)}


def is_split(module: nn.Module) -> bool:
    """True if it has DTensors, unless fully_shard has put them on a line of all ranks: there each has whole samples."""
    meshes = [parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)]
    is_fully_sharded = any(isinstance(part, FSDPModule) for part in module.modules())
    computes_whole_samples = is_fully_sharded and all(mesh.shape == (dist.get_world_size(),) for mesh in meshes)
    return bool(meshes) and not computes_whole_samples


def spread(tensor: Tensor, count: int) -> Tensor:
    """So many numbers of a tensor, from all of its rows and columns: a whole stride could read one column only."""
    values = tensor.detach().reshape(-1)
    places = torch.linspace(0, len(values) - 1, min(len(values), count), dtype=torch.float64, device="cpu")
    return values[places.long()].cpu()


def _some_numbers(tensor: Tensor) -> Tensor:
    # By way of plain numbers: a tensor inside of `torch.func.vmap` fails here, and not where the record is written.
    return torch.tensor(spread(tensor, NUMBERS_OF_A_TENSOR).tolist(), dtype=torch.float64, device="cpu")


def some_weights(module: nn.Module) -> Tensors:
    samples = {}
    for name, parameter in module.named_parameters():
        is_whole = not is_lazy(parameter) and not is_part(name, parameter)
        if is_whole and parameter.is_floating_point() and parameter.numel():
            samples[name] = _some_numbers(parameter)
    return samples


def some_statistics(module: nn.Module) -> Tensors:
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is not None:
            found[f"{name}.running_mean"] = _some_numbers(part.running_mean)
            found[f"{name}.running_var"] = _some_numbers(part.running_var)
    return found
