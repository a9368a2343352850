"""State dicts in files: tied weights once, tensors that share no memory, and names with and without `torch.compile`."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


def is_part(tensor: Any) -> bool:
    """True for a DTensor: what this rank has of a tensor that is sharded, as by FSDP."""
    # Not imported here, because that takes a second. Whoever has made a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def write_safetensors(state_dict: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write `state_dict` to `path` on this process."""
    from safetensors.torch import save_file

    save_file(clean_state_dict_for_safetensors(state_dict), path, metadata={"format": "pt"})


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A dict that safetensors can write: contiguous tensors, each with memory of its own.

    Tied weights are in it once, under the first of their names, and a warning has the others. Different views of the
    same memory are all in it.

    Raises:
        ValueError: for a value that is no tensor, such as the extra state of a module may be.
    """
    first_names: dict[Any, str] = {}
    cleaned: dict[str, torch.Tensor] = {}
    memory_in_use = set()
    removed = []
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is no tensor, and safetensors holds nothing else: pass safe_serialization=False")
        first_name = first_names.setdefault(view_key(tensor, name), name)
        if first_name != name:
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


def view_key(tensor: Any, name: str) -> Any:
    """A key that is equal for two names of the same weights: the same memory, type, shape and strides.

    The strides tell a square matrix from its transpose. Values without such memory are never equal, so their key is
    `name`: tensors on the meta device, empty or sparse ones, and the extra states of modules, which can be any object.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return name
    if is_part(tensor):
        return id(tensor)
    if tensor.data_ptr() == 0:
        return name
    place = (tensor.device, tensor.data_ptr())
    layout = (tensor.dtype, tensor.shape, tensor.stride())
    reading = (tensor.is_conj(), tensor.is_neg())
    return place, layout, reading


def under_names_of(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """`weights` under the names that `model` has for them, wherever the one or the other was compiled.

    `torch.compile` puts a module into another one, so that the name of a weight is `_orig_mod.weight`. Tied weights,
    saved once, get all their names. What `model` does not have keeps its name.
    """
    own = model.state_dict(keep_vars=True)
    if weights.keys() == own.keys():
        # Returned unchanged: a new dict would lose the attribute `_metadata`, which holds the versions of the modules.
        return weights
    own_names = {_without_compiler(name): name for name in own}
    named = {}
    saved_views = {}
    for name, tensor in weights.items():
        own_name = own_names.get(_without_compiler(name), name)
        named[own_name] = tensor
        if own_name in own:
            saved_views[view_key(own[own_name], own_name)] = tensor
    for name, tensor in own.items():
        key = view_key(tensor, name)
        if key in saved_views:
            named.setdefault(name, saved_views[key])
    return named


def _without_compiler(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
