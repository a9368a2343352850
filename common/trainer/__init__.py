"""A Trainer in the shape of `transformers.Trainer`, for any nn.Module, on this repository's accelerator core."""

from common.trainer.arguments import TrainingArguments
from common.trainer.batches import default_data_collator
from common.trainer.callbacks import DefaultFlowCallback, EarlyStoppingCallback, TrainerCallback

from common.trainer.callbacks import TrainerControl, TrainerState  # isort: skip
from common.trainer.checkpoint import get_last_checkpoint
from common.trainer.evaluation import EvalPrediction, PredictionOutput, TrainOutput
from common.trainer.reporting import PrinterCallback, ProgressCallback
from common.trainer.trainer import Trainer

__all__ = ["EvalPrediction", "PredictionOutput", "TrainOutput", "Trainer", "TrainingArguments"]
__all__ += ["DefaultFlowCallback", "EarlyStoppingCallback", "TrainerCallback", "TrainerControl", "TrainerState"]
__all__ += ["PrinterCallback", "ProgressCallback", "default_data_collator", "get_last_checkpoint"]
