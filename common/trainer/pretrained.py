"""Work for the models and tokenizers of `transformers`, which is imported only where there is one."""

from pathlib import Path
from typing import Any


def padding_collator(processing_class: Any) -> Any:
    """A collator that pads samples, for a tokenizer or a feature extractor of sequences; None for anything else."""
    if not hasattr(processing_class, "padding_side"):
        return None
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(processing_class)


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Give a model of `transformers` the special tokens of its tokenizer, of which a script may have added some."""
    if processing_class is None or not hasattr(getattr(model, "config", None), "get_text_config"):
        return
    from transformers import PreTrainedTokenizerBase, ProcessorMixin, trainer_utils

    if isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin):
        trainer_utils.align_special_tokens(model, processing_class)


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


def load_adapters(model: Any, folder: str) -> None:
    """Give a model of PEFT the weights of its adapters, as its `save_pretrained` has written them into `folder`."""
    from peft import load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        source = Path(folder, name)
        if not source.is_dir() and (name == "default" or len(model.peft_config) == 1):
            source = Path(folder)  # "default" has no folder of its own.
        if source.is_dir():  # Of several adapters a script may have saved some.
            weights = load_peft_weights(str(source), device="cpu")
            set_peft_model_state_dict(model, weights, adapter_name=name)


def save(trainer: Any, model: Any, folder: str, weights: dict[str, Any]) -> None:
    """Write model and tokenizer into `folder` as `from_pretrained` reads them; without weights, no file of these."""
    if is_pretrained(model):
        model.save_pretrained(folder, state_dict=weights)
    processing_class = trainer.processing_class
    if processing_class is None:
        processing_class = getattr(trainer.data_collator, "tokenizer", None)
    if processing_class is not None:
        processing_class.save_pretrained(folder)
