"""Weights of a model in one file or, if they are larger than a limit, in several with an index."""

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.files import atomic_write

from .constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .imports import is_peft_available
from .other import extract_model_from_parallel
from .weights import clean_state_dict_for_safetensors, under_names_of, write_file

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".index.json"

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


# Writing shards


@dataclass
class Shard:
    """Weights that go into one file together."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes: int = 0


def split_into_shards(state_dict: Mapping[str, torch.Tensor], largest: float) -> list[Shard]:
    """The weights in their order, in shards of at most `largest` bytes; a larger tensor is a shard of its own.

    Tensors that share their memory come into the same shard and are counted once. The cut is that of huggingface_hub's
    `split_torch_state_dict_into_shards`, by which accelerate saves.
    """
    shards = []
    current = Shard()
    shard_of_memory: dict[Any, Shard] = {}
    for name, tensor in state_dict.items():
        size = tensor.untyped_storage().nbytes()
        memory = (tensor.device, tensor.untyped_storage().data_ptr(), size)
        if memory in shard_of_memory:
            shard_of_memory[memory].weights[name] = tensor
            continue
        if size > largest:
            shard = Shard()
            shards.append(shard)
        else:
            if current.bytes + size > largest:
                shards.append(current)
                current = Shard()
            shard = current
        shard.weights[name] = tensor
        shard.bytes += size
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
    limit = _size_in_bytes(max_shard_size)
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


def _size_in_bytes(size: int | str) -> float:
    """A number of bytes from 1000 or "5.0 GB"."""
    if not isinstance(size, str):
        return size
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]B)\s*", size.upper())
    if found is None:
        raise ValueError(f"`max_shard_size` {size!r} is no number with a unit, as '5.0GB', and no number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


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


# Reading


def load_state_dict(checkpoint_file: str | os.PathLike) -> dict[str, Any]:
    """The weights in one file, safetensors or what `torch.save` wrote, on the CPU.

    Raises:
        UnpicklingError: if the file asks for code to be executed.
    """
    if not str(checkpoint_file).endswith(".safetensors"):
        return torch.load(checkpoint_file, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(checkpoint_file)


def load_checkpoint_in_model(model: torch.nn.Module, checkpoint: str | os.PathLike, *, strict: bool = False) -> None:
    """Load weights into `model`, which stays where it is, with the types it has. The original's other arguments, for
    models in several places and of other types, are out of scope.

    Args:
        checkpoint: a file of weights, an index of shards (.json), or a folder with one of these.
        strict: raise if the checkpoint lacks weights of the model or has others; else warn of the others.

    Raises:
        ValueError: if `checkpoint` is none of these, or an index names a file that is not beside it.
        RuntimeError: if a weight has another shape in the model, and what `strict` says.
        NotImplementedError: for a model on the meta device.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise NotImplementedError("load_checkpoint_in_model: a model on the meta device is out of scope")
    loaded: set[str] = set()
    for path in _weight_files(Path(checkpoint)):
        weights = under_names_of(model, load_state_dict(path))
        model.load_state_dict(weights, strict=False)
        loaded |= weights.keys()
    own = model.state_dict().keys()
    name_of_model = type(model).__name__
    unexpected = sorted(loaded - own)
    missing = sorted(own - loaded)
    if strict and (unexpected or missing):
        what = f"missing keys: {missing}, unexpected keys: {unexpected}"
        raise RuntimeError(f"Error(s) in loading state_dict for {name_of_model}: {what}")
    if unexpected:
        where = f"Some weights of the model checkpoint at {checkpoint} were not used"
        logger.warning("%s when initializing %s: %s", where, name_of_model, unexpected)


def _weight_files(checkpoint: Path) -> list[Path]:
    """The files of `checkpoint`, each of which holds a part of the weights."""
    if checkpoint.is_file():
        return _shards_by_index(checkpoint) if checkpoint.suffix == ".json" else [checkpoint]
    if not checkpoint.is_dir():
        raise ValueError(f"`checkpoint` should be a file of weights, an index of shards or a folder, not {checkpoint}")
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (checkpoint / name).exists():
            return [checkpoint / name]
    indices = list(checkpoint.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) != 1:
        wanted = f"{WEIGHTS_NAME}, {SAFE_WEIGHTS_NAME} or one index of shards (*{INDEX_SUFFIX})"
        raise ValueError(f"{checkpoint} must hold {wanted}; it has {len(indices)} indices")
    return _shards_by_index(indices[0])


def _shards_by_index(index: Path) -> list[Path]:
    """The files that `index` names. They lie beside it; as links, if a cache of downloaded models made the folder."""
    content = json.loads(index.read_text(encoding="utf-8"))
    names = set(content.get("weight_map", content).values())
    paths = [index.parent / name for name in sorted(names)]
    for path in paths:
        if path.parent != index.parent or not path.is_file():
            raise ValueError(f"{index} names {path}, which is no file beside it")
    return paths


def is_peft_model(model: Any) -> bool:
    """True if the model inside `model` is a PeftModel of the library `peft`."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)
