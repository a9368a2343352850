"""State dicts in files: tied weights once, tensors that share no memory, and names with and without `torch.compile`."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


def is_dtensor(value: Any) -> bool:
    """True for a DTensor, which is this rank's shard of a tensor, as under FSDP."""
    # Not imported here, because that takes a second. Whoever has made a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def write_safetensors(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(clean_state_dict_for_safetensors(state_dict), path, metadata={"format": "pt"})


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A dict that safetensors can write: contiguous tensors, each with memory of its own.

    Tied weights are in it once, under the first of their names, and a warning has the others. Different views of the
    same memory are all in it.

    Raises:
        ValueError: for a value that is no tensor, such as the extra state of a module may be.
    """
    first = first_names(state_dict)
    cleaned: dict[str, torch.Tensor] = {}
    memory_in_use = set()
    removed = []
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is no tensor, and safetensors holds nothing else: pass safe_serialization=False")
        if first[name] != name:
            removed.append(name)
            continue
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in memory_in_use:
            tensor = tensor.clone()
        elif storage.data_ptr() != 0:
            memory_in_use.add(storage.data_ptr())
        cleaned[name] = tensor
    if removed:
        logger.warning(f"Removed shared tensor {removed} while saving: the file has it under its first name only")
    return cleaned


def first_names(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """By each name the first name of the same weights, which is another one for tied weights only.

    {"input.weight": a, "bias": b, "output.weight": a}
    gives {"input.weight": "input.weight", "bias": "bias", "output.weight": "input.weight"}
    """
    names: dict[str, str] = {}
    names_of_views: dict[tuple, str] = {}
    for name, value in state_dict.items():
        view = _view_of_memory(value)
        names[name] = name if view is None else names_of_views.setdefault(view, name)
    return names


def _view_of_memory(value: Any) -> tuple | None:
    """What is equal for two tensors if they are the same weights. The strides tell a matrix from its transpose.

    It is None for values that can be compared with none: tensors on the meta device, empty or sparse ones, and the
    extra states of modules, which can be any object.
    """
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if is_dtensor(value):
        return (id(value),)  # it has no address
    if value.data_ptr() == 0:
        return None
    layout = (value.dtype, value.shape, value.stride())
    return (value.device, value.data_ptr(), *layout, value.is_conj(), value.is_neg())


def under_names_of(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """`weights` under the names that `model` has for them. What `model` does not have keeps its name."""
    own = model.state_dict(keep_vars=True)
    if weights.keys() == own.keys():
        # Returned unchanged: a new dict would lose the attribute `_metadata`, which holds the versions of the modules.
        return weights
    # Of the two models one may be compiled: it has "_orig_mod.bias" where the other has "bias".
    own_names = {_without_compiler(name): name for name in own}
    renamed = {own_names.get(_without_compiler(name), name): tensor for name, tensor in weights.items()}
    return _add_tied_names(renamed, own)


def _add_tied_names(weights: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`weights`, where those that are tied in `own` and were saved once have all their names.

    {"input.weight": a} becomes {"input.weight": a, "output.weight": a} if the two are tied in `own`.
    """
    first = first_names(own)
    saved = {first[name]: tensor for name, tensor in weights.items() if name in own}
    tied = {name: saved[first[name]] for name in own if first[name] in saved}
    return {**tied, **weights}


def _without_compiler(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
