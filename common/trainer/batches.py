"""From samples to batches, and from batches to a model: collating, unused columns, labels, predictions."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.nested import leaves, map_nested

# The keys of a sample's label, for the default collator, and of a batch's labels.
LABEL = "label"
LABELS = "labels"


def default_data_collator(samples: list) -> Any:
    """Stack samples along a new first dimension: dicts become a dict, tuples a tuple, anything else a tensor.

    As in `transformers`, "label" in dicts becomes "labels", of dtype int64 or float32; strings and None are left out.
    """
    first = samples[0]
    if isinstance(first, tuple | list):
        columns = zip(*samples, strict=True)
        return tuple(_stack(list(column)) for column in columns)
    if isinstance(first, Mapping):
        return _stack_dicts(samples)
    return _stack(samples)


def _stack_dicts(samples: list[Mapping]) -> dict[str, Tensor]:
    first = samples[0]
    batch = {}
    if first.get(LABEL) is not None:
        # Only whole numbers become int64: a list or an array becomes float32.
        labels = [sample[LABEL] for sample in samples]
        number = labels[0].item() if isinstance(labels[0], Tensor) else labels[0]
        is_whole = isinstance(number, int | np.integer)
        batch[LABELS] = torch.tensor(labels, dtype=torch.long if is_whole else torch.float)
    for key, value in first.items():
        if key != LABEL and value is not None and not isinstance(value, str):
            batch[key] = _stack([sample[key] for sample in samples])
    return batch


def _stack(values: list) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def collate_columns(samples: list, collator: Callable[[list], Any], columns: set[str]) -> Any:
    """The batch that `collator` makes of samples which, if they are dicts, have no keys but `columns`."""
    kept = []
    for sample in samples:
        if isinstance(sample, dict):
            sample = {key: value for key, value in sample.items() if key in columns}
        kept.append(sample)
    if all(isinstance(sample, dict) and not sample for sample in kept):
        raise no_common_column(samples[0], columns)
    return collator(kept)


def no_common_column(given: Iterable[str], taken: Iterable[str]) -> ValueError:
    columns = f"{', '.join(given)} of the samples, {', '.join(sorted(set(taken)))} of the model"
    return ValueError(f"no column in common: {columns}. remove_unused_columns=False keeps them all")


def is_table(dataset: Any) -> bool:
    """True for a `Dataset` of the library `datasets`: as in the original, the columns of others go in the collator."""
    library = sys.modules.get("datasets")  # It may be a folder of the script.
    return isinstance(dataset, getattr(library, "Dataset", ())) and hasattr(dataset, "remove_columns")


def parameters(function: Callable) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def model_inside(model: nn.Module) -> nn.Module:
    """The model itself, or the one in a wrapper: PEFT's adapters, a compiled model, DataParallel, or one of one's own.

    A wrapper of one's own has one child, and a `forward` that takes `*args` and `**kwargs` alone.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)  # PEFT's
    if get_base_model is not None:
        return get_base_model()
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    children = list(model.children())
    if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] or len(children) != 1:
        return model
    return model_inside(children[0])


def find_labels(model: nn.Module) -> list[str]:
    """The parameters of the model's `forward` that have "label" in their name, and the positions of an answer."""
    inside = model_inside(model)
    others = ("start_positions", "end_positions") if "QuestionAnswering" in type(inside).__name__ else ()
    return [name for name in parameters(inside.forward) if "label" in name or name in others]


def get_labels(batch: Any, label_names: list[str]) -> Any:
    """The labels in a batch: those of all `label_names` in a dict, or the last element of a tuple.

    Several labels are returned in a tuple. Without labels, or if one of them is missing in a dict, this is None; but
    `()` for a dict whose "return_loss" says that the model computes a loss without labels.
    """
    if isinstance(batch, Mapping):
        if not label_names and batch.get("return_loss"):
            return ()
        labels = tuple(batch.get(name) for name in label_names)
    else:
        has_labels = isinstance(batch, tuple | list) and len(batch) > 1
        labels = tuple(batch[-1:]) if has_labels else ()
    if not labels or any(label is None for label in labels):
        return None
    if len(labels) > 1:
        return labels
    # A tuple, as `zip` makes it, has an entry for each sample, as a list has.
    return list(labels[0]) if isinstance(labels[0], tuple) else labels[0]


def split_labels(batch: Any) -> tuple[Any, Any]:
    """The inputs in a batch, and its labels or None: the "labels" of a dict, or the last element of a tuple."""
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key != LABELS}
        return inputs, batch.get(LABELS)
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], batch[-1]
    return batch, None


def first_samples(batch: Any, num_rows: int, count: int) -> Any:
    """The first `count` samples of a batch of `num_rows`. A tensor or list of another length stays as it is."""

    def has_samples(part: Any) -> bool:
        is_array = isinstance(part, Tensor | np.ndarray) and part.ndim > 0
        # A batch of 2 samples for a model with 2 arguments: the list of arguments is not a list of samples.
        is_list = isinstance(part, tuple | list) and part is not batch
        return (is_array or is_list) and len(part) == num_rows

    def cut(part: Any) -> Any:
        return part[:count] if has_samples(part) else part

    return map_nested(cut, batch, is_leaf=has_samples)


def call_model(model: nn.Module, batch: Any, **more: Any) -> Any:
    """model(**batch) for a dict, model(*batch) for a tuple, else model(batch); `more` by name."""
    if isinstance(batch, Mapping):
        return model(**batch, **more)
    if isinstance(batch, tuple | list):
        return model(*batch, **more)
    return model(batch, **more)


def get_logits(outputs: Any, ignore_keys: list[str], holds_loss: bool) -> Any:
    """The outputs of a model besides its loss: one tensor if there is one, else a tuple of them.

    A model that returns a list gets a list back.

    Args:
        ignore_keys: keys of a dict, or attributes of an object, to leave out.
        holds_loss: True if "loss", or a tuple's first element, is a loss and no prediction.
    """
    if isinstance(outputs, Tensor):
        return () if outputs.dim() == 0 else outputs
    if isinstance(outputs, tuple | list):
        if outputs and isinstance(outputs[0], Mapping):
            return list(outputs)  # an entry for each sample, as a detector's, and no loss
        # A slice of a list is a list, and one of a named tuple is a tuple.
        logits: Any = outputs[1:] if holds_loss else outputs[:]
    else:
        ignored = [*ignore_keys, "loss"] if holds_loss else ignore_keys
        named = dict(outputs) if isinstance(outputs, Mapping) else vars(outputs)
        logits = tuple(value for name, value in named.items() if name not in ignored and value is not None)
    for leaf in leaves(logits):
        if not isinstance(leaf, Tensor | np.ndarray | int | float | str | None):
            raise TypeError(f"the model's outputs hold a {type(leaf).__name__}: name its key in ignore_keys")
    return logits[0] if len(logits) == 1 else logits
