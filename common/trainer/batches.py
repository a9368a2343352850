"""From samples to batches, and from batches to a model: collating, unused columns, labels."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def default_data_collator(samples: list) -> Any:
    """Stack samples along a new first dimension: dicts become a dict, tuples a tuple, anything else a tensor.

    In dicts "label" and "label_ids" become "labels", and strings and None are left out, as `transformers` does. The
    first sample says which keys there are; numbers become tensors of torch's default types.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {
            "labels" if key in ("label", "label_ids") else key: _stack([sample[key] for sample in samples])
            for key, value in first.items()
            if value is not None and not isinstance(value, str)
        }
    if isinstance(first, tuple | list):
        return tuple(_stack(list(column)) for column in zip(*samples, strict=True))
    return _stack(samples)


def _stack(values: list) -> torch.Tensor:
    if hasattr(values[0], "__array__"):  # tensors and NumPy arrays
        return torch.stack([torch.as_tensor(value) for value in values])
    return torch.tensor(values)


class ColumnFilter:
    """A collator that drops, from samples that are dicts, the keys that the model does not take.

    Raises:
        ValueError: when none of a sample's keys is left.
    """

    def __init__(self, collator: Callable[[list], Any], model: nn.Module, label_names: list[str]) -> None:
        # "label" and "label_ids" become "labels" in the default collator.
        self.collator, self.columns = collator, {*parameters(model.forward), *label_names, "label", "label_ids"}

    def __call__(self, samples: list) -> Any:
        if isinstance(samples[0], Mapping):
            kept = [key for key in samples[0] if key in self.columns]
            if not kept:
                columns = f"{', '.join(samples[0])} of the samples, {', '.join(sorted(self.columns))} of the model"
                raise ValueError(f"no column in common: {columns}. remove_unused_columns=False keeps them all")
            samples = [{key: sample[key] for key in kept} for sample in samples]
        return self.collator(samples)


def parameters(function: Callable) -> list[str]:
    """The names of what a function takes."""
    return list(inspect.signature(function).parameters)


def split_labels(batch: Any, label_names: list[str]) -> tuple[Any, Any]:
    """The batch without its labels, and the labels: a tensor, a tuple of several, or None.

    A dict's labels are its `label_names`, all of which must be there; a tuple's are its last element.
    """
    if isinstance(batch, Mapping):
        labels = tuple(batch.get(name) for name in label_names)
        if not labels or any(label is None for label in labels):
            return batch, None
        rest = {key: value for key, value in batch.items() if key not in label_names}
        return rest, labels[0] if len(labels) == 1 else labels
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], batch[-1]
    return batch, None


def call_model(model: nn.Module, batch: Any) -> Any:
    """model(**batch) for a dict, model(*batch) for a tuple, else model(batch)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def loss_and_logits(outputs: Any, ignore_keys: list[str] | None = None, labelled: bool = True) -> tuple[Any, Any]:
    """What a model returned, taken apart: its loss or None, and the rest as one tensor or a tuple.

    A dict or an object has its loss under "loss", a tuple in front if it was given labels. A tensor is all loss if it
    has no dimension, else all logits.
    """
    if isinstance(outputs, torch.Tensor):
        return (outputs, None) if outputs.dim() == 0 else (None, outputs)
    if isinstance(outputs, tuple | list):
        loss, logits = (outputs[0], tuple(outputs[1:])) if labelled else (None, tuple(outputs))
    else:
        named = dict(outputs) if isinstance(outputs, Mapping) else dict(vars(outputs))
        loss, ignored = named.pop("loss", None), ignore_keys or []
        logits = tuple(value for name, value in named.items() if name not in ignored and value is not None)
    return loss, logits[0] if len(logits) == 1 else logits or None
