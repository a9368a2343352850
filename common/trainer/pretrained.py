"""What the Trainer does for the models and tokenizers of `transformers`, or of their kind.

All of it goes by the methods that they have, so nothing of `transformers` is imported.
"""

from typing import Any

from common.trainer.batches import LABEL, LABELS


class PaddingCollator:
    """A collator that lets a tokenizer pad samples to the longest of a batch, as `DataCollatorWithPadding` there."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, samples: list) -> Any:
        batch = self.tokenizer.pad(samples, padding=True, return_tensors="pt")
        for name in (LABEL, "label_ids"):
            if name in batch:
                batch[LABELS] = batch.pop(name)
        return batch


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Give the configurations of a model the special tokens of its tokenizer, of which a script may have added some.

    A token that the tokenizer lacks stays as it is. Where a configuration lists several ends, it keeps them.
    """
    has_tokens = hasattr(processing_class, "eos_token_id")
    tokenizer = processing_class if has_tokens else getattr(processing_class, "tokenizer", None)
    if tokenizer is None or not hasattr(getattr(model, "config", None), "get_text_config"):
        return
    holders = [model.config.get_text_config()]
    generation_config = getattr(model, "generation_config", None)
    if generation_config is not None:
        holders.append(generation_config)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        known = [_tokens(holder, name) for holder in holders]
        if token is None or all(token in tokens for tokens in known):
            continue
        for holder, before in zip(holders, known, strict=True):
            has_list = isinstance(getattr(holder, name, None), list) or holder is generation_config
            if has_list and name == "eos_token_id":
                others = [other for other in before if other not in (None, token)]
                setattr(holder, name, [token, *others])
            else:
                setattr(holder, name, token)


def _tokens(holder: Any, name: str) -> list:
    tokens = getattr(holder, name, None)
    return tokens if isinstance(tokens, list) else [tokens]


def enable_activation_checkpointing(model: Any, options: Any) -> None:
    """Let a model compute activations again in the backward pass. A model that has no method for it raises."""
    options = dict(options or {})
    more = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **more)
    else:  # the older name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **more)


def checkpoints_activations(model: Any, args: Any) -> bool:
    """True for a model of `transformers` that computes, or will compute, activations again. Others do not say it."""
    says_it = hasattr(type(model), "is_activation_checkpointing")
    return says_it and (args.activation_checkpointing or model.is_activation_checkpointing)


def is_pretrained(model: Any) -> bool:
    """True for a model that `from_pretrained` finds again by its configuration, or by that of its adapters."""
    has_configuration = hasattr(model, "peft_config") or hasattr(getattr(model, "config", None), "save_pretrained")
    return has_configuration and hasattr(type(model), "save_pretrained")


def save(model: Any, processing_class: Any, folder: str, weights: dict[str, Any]) -> None:
    """Write what `from_pretrained` needs of such a model, and of a tokenizer, into `folder`.

    Args:
        weights: those of the whole model; if there are none, the configuration is written alone.
    """
    if is_pretrained(model):
        model.save_pretrained(folder, state_dict=weights)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
