"""The making of a Trainer: what it does to the process, its accelerator, and a look at its subclass."""

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from common.accelerator import Accelerator, utils
from common.accelerator.logging import get_logger
from common.accelerator.state import AcceleratorState
from common.trainer import pretrained
from common.trainer.training_args import TrainingArguments

logger = get_logger(__name__)

# Methods of the original's releases that public subclasses override, and that no Trainer of ours calls.
NEVER_CALLED = (
    "_clip_grad_norm",
    "_determine_best_metric",
    "_evaluate",
    "_inner_training_loop",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_rotate_checkpoints",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "create_accelerator_and_postprocess",
    "get_batch_samples",
)


def configure_process(args: TrainingArguments) -> None:
    """Make the changes to the process with which a Trainer begins, as in `transformers`: seeds, precisions, loggers."""
    utils.set_seed(args.seed)
    if args.tf32 is not None and torch.cuda.is_available():
        torch.backends.fp32_precision = "tf32" if args.tf32 else "ieee"  # type: ignore[attr-defined]
    elif args.tf32:
        raise ValueError("tf32 needs a GPU")
    # Each Trainer chooses its own mixed precision. `transformers` calls this method of the accelerator for it too.
    AcceleratorState._reset_state()
    if args.log_level != "passive":
        for library in ("transformers", "common.trainer"):
            logging.getLogger(library).setLevel(args.get_process_log_level())


def make_accelerator(args: TrainingArguments, model: nn.Module) -> Accelerator:
    config: Any = args.accelerator_config
    # It is stateful, because a checkpoint within an epoch holds the position.
    stateful = utils.DataLoaderConfiguration(**asdict(config), data_seed=args.data_seed, use_stateful_dataloader=True)
    finds_unused = args.ddp_find_unused_parameters
    if finds_unused is None:
        # The graph that DDP walks through has gaps where activations are computed again.
        finds_unused = not pretrained.checkpoints_activations(model, args)
    return Accelerator(
        cpu=args.use_cpu,
        mixed_precision=args.mixed_precision,
        fsdp_plugin=args.make_fsdp_plugin(),
        # The Trainer counts the micro-batches of a step itself.
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=1),
        dataloader_config=stateful,
        kwargs_handlers=[
            utils.DistributedDataParallelKwargs(find_unused_parameters=finds_unused),
            utils.InitProcessGroupKwargs(timeout=args.ddp_timeout_delta),
        ],
        dynamo_backend="inductor" if args.torch_compile else None,
        log_with=[*args.report_to] or None,
        project_dir=args.output_dir,
    )


def warn_of_vain_overrides(trainer: object) -> None:
    """Name the methods of a subclass that it has overridden in vain."""
    never_called = [name for name in NEVER_CALLED if hasattr(trainer, name)]
    if never_called:
        logger.warning(f"this Trainer does not call {', '.join(never_called)} of {type(trainer).__name__}")
