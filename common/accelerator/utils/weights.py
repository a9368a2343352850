"""Weights as safetensors takes them: each tensor once, contiguous, with memory of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def write_file(obj: Any, path: Path, safe_serialization: bool) -> None:
    """Write `obj` to `path` on this process: as safetensors or by `torch.save`."""
    if safe_serialization:
        from safetensors.torch import save_file

        save_file(clean_state_dict_for_safetensors(obj), path, metadata={"format": "pt"})
    else:
        torch.save(obj, path)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A dict that safetensors can write: contiguous tensors, each with memory of its own.

    Tied weights are in it once, under the first of their names. Different views of the same memory are all in it.
    """
    first_names: dict[Any, str] = {}
    cleaned: dict[str, torch.Tensor] = {}
    memory_in_use = set()
    for name, tensor in state_dict.items():
        first_name = first_names.setdefault(view_key(tensor, name), name)
        if first_name != name:
            continue
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in memory_in_use:
            tensor = tensor.clone()
        elif storage.data_ptr() != 0:
            memory_in_use.add(storage.data_ptr())
        cleaned[name] = tensor
    return cleaned


def view_key(tensor: torch.Tensor, name: str) -> Any:
    """What two names of the same weights have in common: the same elements, in the same places, as the same type.

    A square matrix and its transpose have the same memory and the same shape; they differ in their strides. Tensors
    without memory, on the meta device or without elements, have nothing in common: their key is `name`.
    """
    if tensor.data_ptr() == 0:
        return name
    place = (tensor.device, tensor.data_ptr())
    layout = (tensor.dtype, tensor.shape, tensor.stride())
    reading = (tensor.is_conj(), tensor.is_neg())
    return place, layout, reading
