"""Reading the weights of a model."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from .constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .imports import is_peft_available
from .unwrap import extract_model_from_parallel
from .weights import under_names_of

logger = logging.getLogger(__name__)


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
    """Load weights into `model`, which stays where it is, with the types it has.

    Args:
        checkpoint: a file of weights, or a folder with pytorch_model.bin or model.safetensors.
        strict: raise if the checkpoint lacks weights of the model or has others; else warn of the others.

    Raises:
        ValueError: if `checkpoint` is neither; weights in several files, with an index, are out of scope.
        RuntimeError: if a weight has another shape in the model, and what `strict` says.
        NotImplementedError: for a model on the meta device.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise NotImplementedError("load_checkpoint_in_model: a model on the meta device is out of scope")
    weights = under_names_of(model, load_state_dict(_weight_file(Path(checkpoint))))
    unexpected = model.load_state_dict(weights, strict=strict).unexpected_keys
    if unexpected:
        where = f"Some weights of the model checkpoint at {checkpoint} were not used"
        logger.warning("%s when initializing %s: %s", where, type(model).__name__, unexpected)


def is_peft_model(model: Any) -> bool:
    """True for a model of the library peft, prepared or not."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def _weight_file(checkpoint: Path) -> Path:
    # A .json file is the index of weights in several files. In a folder with both kinds the original takes the .bin.
    for file in (checkpoint, checkpoint / WEIGHTS_NAME, checkpoint / SAFE_WEIGHTS_NAME):
        if file.is_file() and file.suffix != ".json":
            return file
    raise ValueError(f"{checkpoint} should be a file of weights or a folder with one; several files are out of scope")
