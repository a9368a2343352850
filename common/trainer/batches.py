"""From samples to batches, and from batches to a model: collating, unused columns, labels."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What the default collator calls a sample's label, and what a batch's labels are called.
LABEL = "label"
LABELS = "labels"
# The loss types for which `LOSS_MAPPING` of `transformers` has `ForCausalLMLoss`.
CAUSAL_LOSS_TYPES = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def default_data_collator(samples: list) -> Any:
    """Stack samples along a new first dimension: dicts become a dict, tuples a tuple, anything else a tensor.

    In dicts "label" becomes "labels", of dtype int64 or float32, and strings and None are left out, as `transformers`
    does. The first sample says which keys there are; numbers become tensors of torch's default types.
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


class ColumnFilter:
    """A collator that drops, from samples that are dicts, the keys that the model does not take.

    Raises:
        ValueError: when no key of any sample is left.
    """

    def __init__(self, collator: Callable[[list], Any], model: nn.Module, label_names: list[str]) -> None:
        self.collator = collator
        self.columns = {*parameters(model.forward), *label_names, LABEL}

    def __call__(self, samples: list) -> Any:
        kept = []
        for sample in samples:
            if isinstance(sample, dict):
                sample = {key: value for key, value in sample.items() if key in self.columns}
            kept.append(sample)
        if all(isinstance(sample, dict) and not sample for sample in kept):
            columns = f"{', '.join(samples[0])} of the samples, {', '.join(sorted(self.columns))} of the model"
            raise ValueError(f"no column in common: {columns}. remove_unused_columns=False keeps them all")
        return self.collator(kept)


def parameters(function: Callable) -> list[str]:
    """The names of what a function takes."""
    return list(inspect.signature(function).parameters)


def find_labels(model: nn.Module) -> list[str]:
    """The parameters of the model's `forward` that have "label" in their name, or say where an answer stands."""
    others = ("start_positions", "end_positions") if "QuestionAnswering" in type(model).__name__ else ()
    return [name for name in parameters(model.forward) if "label" in name or name in others]


def takes_any_keyword(function: Callable) -> bool:
    """True for a function with a `**kwargs`."""
    taken = inspect.signature(function).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in taken)


def takes_loss_keywords(model: nn.Module) -> bool:
    """True if `forward` has a `**kwargs`: the Trainer then passes it `num_items_in_batch`.

    A model whose attribute `accepts_loss_kwargs` is set says it so.
    """
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return takes_any_keyword(model.forward)


def shifts_labels(model: nn.Module) -> bool:
    """True if the model's loss compares the output at a position with the label of the next position.

    Then the first label of each row is no target, and is not counted. The causal language models of `transformers`
    say it by their attribute `loss_type`. In an encoder-decoder the labels stand where they are predicted.
    """
    config = getattr(model, "config", None)
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in CAUSAL_LOSS_TYPES and not is_encoder_decoder


def get_labels(batch: Any, label_names: list[str]) -> Any:
    """A dict's labels, all of which must be there, or a tuple's last element; a tuple of several labels, or None."""
    if isinstance(batch, Mapping):
        labels = tuple(batch.get(name) for name in label_names)
        if not labels or any(label is None for label in labels):
            return None
        return labels[0] if len(labels) == 1 else labels
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[-1]
    return None


def split_labels(batch: Any) -> tuple[Any, Any]:
    """A batch without a dict's "labels" or a tuple's last element, and these labels; None where there are none."""
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key != LABELS}
        return inputs, batch.get(LABELS)
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return batch[:-1], batch[-1]
    return batch, None


def count_labels(batch: Any, shifted: bool = False) -> Tensor | None:
    """Labels other than -100 in a batch, a tensor without dimensions; None where there are none to count.

    `shift_labels`, which some collators of language models make, are counted in place of the labels.

    Args:
        shifted: leave out the first label of each row, see `shifts_labels`.
    """
    _, labels = split_labels(batch)
    if labels is not None and isinstance(batch, Mapping) and "shift_labels" in batch:
        labels = batch["shift_labels"]
    elif shifted and isinstance(labels, Tensor):
        labels = labels[..., 1:]
    return labels.ne(-100).sum() if isinstance(labels, Tensor) else None


def count_samples(batch: Any) -> int | None:
    """The length of the first tensor in a batch; None where there is none, as in a batch of texts."""
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            found = count_samples(part)
            if found is not None:
                return found
    return None


def call_model(model: nn.Module, batch: Any, **more: Any) -> Any:
    """model(**batch) for a dict, model(*batch) for a tuple, else model(batch); `more` by name."""
    if isinstance(batch, Mapping):
        return model(**batch, **more)
    if isinstance(batch, tuple | list):
        return model(*batch, **more)
    return model(batch, **more)


def get_loss(outputs: Any) -> Tensor:
    """The loss among a model's outputs: under "loss" in a dict or an object, first in a tuple, or a bare scalar.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(outputs, Tensor):
        loss = outputs if outputs.dim() == 0 else None
    elif isinstance(outputs, tuple | list):
        loss = outputs[0]
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError("the model returned no loss: let it, pass compute_loss_func, or override compute_loss")
    return loss


def get_logits(outputs: Any, ignore_keys: list[str], holds_loss: bool) -> Any:
    """The outputs of a model besides its loss: one tensor, or several or none in a tuple, or in a list as the model's.

    Args:
        ignore_keys: keys of a dict, or attributes of an object, to leave out.
        holds_loss: whether "loss", or a tuple's first element, is a loss and no prediction.
    """
    if isinstance(outputs, Tensor):
        return () if outputs.dim() == 0 else outputs
    if isinstance(outputs, tuple | list):
        # A slice of a list is a list, and one of a named tuple is a tuple.
        logits: Any = outputs[1:] if holds_loss else outputs[:]
    else:
        named = dict(outputs) if isinstance(outputs, Mapping) else vars(outputs)
        ignored = [*ignore_keys, "loss"] if holds_loss else ignore_keys
        kept = [name for name, value in named.items() if name not in ignored and value is not None]
        logits = tuple(named[name] for name in kept)
    return logits[0] if len(logits) == 1 else logits
