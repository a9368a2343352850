"""Weights of a model in one file or, if they are larger than a limit, in several with an index."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

from common.files import atomic_write, sync_to_disk

from .constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .imports import is_peft_available
from .other import extract_model_from_parallel
from .weights import clean_state_dict_for_safetensors, under_names_of, view_key, write_file

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".index.json"

_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SHARD_UNITS = _DECIMAL_UNITS | {"TB": 10**12}


# Sizes


def convert_file_size_to_int(size: int | str) -> int:
    """A number of bytes from 1000, "5.0GB", "5 GiB" or, in bits, "5Gb".

    Raises:
        ValueError: for anything else.
    """
    if isinstance(size, int) and size >= 0:
        return size
    return _parse_size(str(size), _DECIMAL_UNITS)


def _shard_size_in_bytes(size: int | float | str) -> int | float:
    """A limit for shards. Texts are in bytes, "5gb" too, and there are terabytes, as in the original's `save_model`."""
    if not isinstance(size, str):
        return size
    return _parse_size(size.strip().upper(), _SHARD_UNITS)


def _parse_size(size: str, decimal_units: dict[str, int]) -> int:
    try:
        unit = size[-3:].upper()
        if unit in _BINARY_UNITS:
            number = int(float(size[:-3]) * _BINARY_UNITS[unit])
        else:
            number = int(float(size[:-2]) * decimal_units[size[-2:].upper()])
            is_in_bits = size.endswith("b")
            number = number // 8 if is_in_bits else number
    except (ValueError, OverflowError, KeyError):
        number = -1
    if number < 0:
        message = f"`size` {size} is not in a valid format."
        raise ValueError(f"{message} Use an integer for bytes, or a string with an unit (like '5.0GB').")
    return number


# Writing shards


@dataclass
class Shard:
    """Weights that go into one file together."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.weights[name] = tensor
        self.bytes += _storage_bytes(tensor)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def split_into_shards(state_dict: Mapping[str, torch.Tensor], largest: int | float) -> list[Shard]:
    """The weights in their order, in shards of at most `largest` bytes; a larger tensor is a shard of its own.

    Tensors that share their memory come into the same shard and are counted once. The cut is that of huggingface_hub's
    `split_torch_state_dict_into_shards`, by which accelerate saves.
    """
    shards = []
    current = Shard()
    shard_of_memory: dict[Any, Shard] = {}
    for name, tensor in state_dict.items():
        memory = (tensor.device, tensor.untyped_storage().data_ptr(), _storage_bytes(tensor))
        if memory in shard_of_memory:
            shard_of_memory[memory].weights[name] = tensor
            continue
        if _storage_bytes(tensor) > largest:
            shard = Shard()
            shards.append(shard)
        else:
            if current.bytes + _storage_bytes(tensor) > largest:
                shards.append(current)
                current = Shard()
            shard = current
        shard.add(name, tensor)
        shard_of_memory[memory] = shard
    if current.weights:
        shards.append(current)
    return shards


def write_weights(
    state_dict: Mapping[str, torch.Tensor],
    folder: Path,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write `state_dict` to files in `folder`, as accelerate's `save_model` names them, in place of those of before.

    One file if all fit: model.safetensors or pytorch_model.bin. Else model-00001-of-00003.safetensors, …, and
    model.safetensors.index.json, which names the file of each weight. Each file is whole or not there, and the index
    is the last to appear.

    Raises:
        ValueError: if `max_shard_size` is no size.
        OSError: if something cannot be written.
    """
    limit = _shard_size_in_bytes(max_shard_size)
    whole_name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    if safe_serialization:
        state_dict = clean_state_dict_for_safetensors(state_dict)
    shards = split_into_shards(state_dict, limit)
    names = _shard_names(whole_name, len(shards))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        # What is entered first is put in its place last.
        if len(shards) > 1:
            index = files.enter_context(atomic_write(folder / f"{whole_name}{INDEX_SUFFIX}"))
            index.write_text(_index_of(shards, names), encoding="utf-8")
        for name, shard in zip(names, shards, strict=True):
            draft = files.enter_context(atomic_write(folder / name))
            write_file(shard.weights, draft, safe_serialization)
    _remove_stale_weights(folder, whole_name, names)


def _shard_names(whole_name: str, number: int) -> list[str]:
    if number == 1:
        return [whole_name]
    stem, suffix = os.path.splitext(whole_name)
    return [f"{stem}-{index:05d}-of-{number:05d}{suffix}" for index in range(1, number + 1)]


def _index_of(shards: list[Shard], names: list[str]) -> str:
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        weight_map |= dict.fromkeys(shard.weights, name)
    total_size = sum(shard.bytes for shard in shards)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _remove_stale_weights(folder: Path, whole_name: str, written: list[str]) -> None:
    """Remove the whole file, the shards and the index of an earlier save that this one does not have."""
    stem, suffix = os.path.splitext(whole_name)
    shard = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}" + re.escape(suffix))
    index_name = f"{whole_name}{INDEX_SUFFIX}"
    current = set(written)
    if len(written) > 1:
        current.add(index_name)
    for path in folder.iterdir():
        belongs_to_weights = path.name in (whole_name, index_name) or shard.fullmatch(path.name)
        if belongs_to_weights and path.name not in current:
            path.unlink()
    sync_to_disk(folder)


# Reading


def load_state_dict(checkpoint_file: str | os.PathLike, device_map: dict[str, Any] | None = None) -> dict[str, Any]:
    """The weights in one file: safetensors, or what `torch.save` wrote.

    Args:
        device_map: {"": device} reads them to that device.

    Raises:
        NotImplementedError: for a `device_map` of several devices.
        UnpicklingError: if the file asks for code to be executed.
    """
    device = _single_device(device_map)
    if not str(checkpoint_file).endswith(".safetensors"):
        return torch.load(checkpoint_file, map_location=device, weights_only=True)
    from safetensors.torch import load_file

    return load_file(checkpoint_file, device=str(device))


def _single_device(device_map: dict[str, Any] | None) -> torch.device:
    if not device_map:
        return torch.device("cpu")
    if len(device_map) > 1 or set(device_map.values()) == {"disk"}:
        raise NotImplementedError("a device_map that spreads a model over several devices is out of scope")
    (device,) = device_map.values()
    return torch.device(device)


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike,
    device_map: dict[str, Any] | None = None,
    offload_folder: str | os.PathLike | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into `model`, which stays where it is, with the types it has.

    Args:
        checkpoint: a file of weights, an index of shards (.json), or a folder with one of these.
        strict: raise if the checkpoint lacks weights of the model or has others; else warn of the others.

    Raises:
        ValueError: if `checkpoint` is none of these, or an index names a file that is not beside it.
        RuntimeError: if a weight has another shape in the model, and what `strict` says.
        NotImplementedError: for models in several places, other types, and what FSDP needs.
    """
    asked_for = {
        "device_map": device_map,
        "offload_folder": offload_folder,
        "dtype": dtype,
        "offload_state_dict": offload_state_dict,
        "offload_buffers": offload_buffers,
        "keep_in_fp32_modules": keep_in_fp32_modules,
        "offload_8bit_bnb": offload_8bit_bnb,
        "full_state_dict=False": not full_state_dict,
        "broadcast_from_rank0": broadcast_from_rank0,
    }
    out_of_scope = [name for name, value in asked_for.items() if value]
    if out_of_scope:
        raise NotImplementedError(f"load_checkpoint_in_model: {', '.join(out_of_scope)} is out of scope")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    tensors = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    if any(tensor.is_meta for tensor in tensors):
        raise NotImplementedError("load_checkpoint_in_model: a model on the meta device is out of scope")
    loaded: set[str] = set()
    for path in _weight_files(Path(checkpoint)):
        weights = under_names_of(model, load_state_dict(path))
        model.load_state_dict(weights, strict=False)
        loaded |= weights.keys()
    _compare_names(model, checkpoint, loaded, strict)


def _compare_names(model: torch.nn.Module, checkpoint: str | os.PathLike, loaded: set[str], strict: bool) -> None:
    own = model.state_dict()
    name_of_model = type(model).__name__
    unexpected = loaded - own.keys()
    # A file holds tied weights once.
    present = {view_key(own[name], name) for name in loaded & own.keys()}
    missing = [name for name, tensor in own.items() if view_key(tensor, name) not in present]
    if strict and (unexpected or missing):
        what = f"missing keys: {missing}, unexpected keys: {sorted(unexpected)}"
        raise RuntimeError(f"Error(s) in loading state_dict for {name_of_model}: {what}")
    if unexpected:
        where = f"Some weights of the model checkpoint at {checkpoint} were not used"
        logger.warning("%s when initializing %s: %s", where, name_of_model, unexpected)


def _weight_files(checkpoint: Path) -> list[Path]:
    """The files of `checkpoint`, each of which holds a part of the weights."""
    if checkpoint.is_dir():
        return _weight_files_in(checkpoint)
    if not checkpoint.is_file():
        raise ValueError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a sharded "
            f"checkpoint, or a folder containing one of these, but got {checkpoint}."
        )
    return _shards_by_index(checkpoint) if checkpoint.suffix == ".json" else [checkpoint]


def _weight_files_in(folder: Path) -> list[Path]:
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (folder / name).exists():
            return [folder / name]
    indices = [path for path in folder.iterdir() if path.name.endswith(INDEX_SUFFIX)]
    if not indices:
        wanted = f"a `{INDEX_SUFFIX}` file or a {WEIGHTS_NAME} or a {SAFE_WEIGHTS_NAME} file"
        raise ValueError(f"{folder} is not a folder containing {wanted}")
    if len(indices) > 1:
        raise ValueError(f"{folder} containing more than one `{INDEX_SUFFIX}` file, delete the irrelevant ones.")
    return _shards_by_index(indices[0])


def _shards_by_index(index: Path) -> list[Path]:
    """The files that `index` names. They lie beside it; as links, if a cache of downloaded models made the folder."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = set(content.get("weight_map", content).values())
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of weights: {error}") from error
    for name in names:
        is_plain = isinstance(name, str) and PurePath(name).parts == (name,)
        if not is_plain or name == ".." or PurePath(name).is_absolute():
            raise ValueError(f"{index} names {name!r}, which is no file beside it")
    return [index.parent / name for name in sorted(names)]


def is_peft_model(model: Any) -> bool:
    """True if the model inside `model` is a PeftModel of the library `peft`."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)
