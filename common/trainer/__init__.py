"""A Trainer in the shape of `transformers.Trainer`, for any nn.Module, on this repository's accelerator core."""

# ruff: noqa: F401

from common.trainer.batches import default_data_collator
from common.trainer.checkpoint import get_last_checkpoint
from common.trainer.evaluation import EvalPrediction, PredictionOutput, TrainOutput
from common.trainer.reporting import PrinterCallback, ProgressCallback
from common.trainer.trainer import Trainer
from common.trainer.trainer_callback import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from common.trainer.training_args import AcceleratorConfig, TrainingArguments
