"""The loop behind evaluate and predict: every sample once, on one rank, in O(n) time and host memory.

Each rank works through its own batches without waiting for the others; no batch is padded, so a mean loss weighs
exactly as many samples as it covers. Predictions leave the device batch by batch, and only then are the ranks'
batches dealt back into the order of the dataset.
"""

import math
import time
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from common.accelerator.data_loader import DataLoaderShard, prepare_data_loader
from common.accelerator.utils import find_batch_size, gather_object, send_to_device

# NumPy arrays, or tuples of them, with a row for each sample in dataset order; `label_ids` is None without labels.
EvalPrediction = namedtuple("EvalPrediction", "predictions label_ids")
TrainOutput = namedtuple("TrainOutput", "global_step training_loss metrics")
PredictionOutput = namedtuple("PredictionOutput", "predictions label_ids metrics")


def shard_for_evaluation(dataloader: DataLoader, device: torch.device) -> DataLoader:
    """A loader of this rank's batches, on `device`: of all batches every `num_processes`-th, none of them padded."""
    if isinstance(dataloader, DataLoaderShard):
        return dataloader
    return prepare_data_loader(dataloader, device, put_on_device=True, even_batches=False)


def evaluation_loop(trainer, dataloader, prediction_loss_only, ignore_keys, prefix) -> PredictionOutput:
    """Run `trainer.prediction_step` over `dataloader` and put the ranks' results together; all ranks get them.

    The loss is the sum over samples divided by their number, summed in float64: each batch's mean loss counts as
    often as the batch has samples.
    """
    start_time = time.time()
    trainer.eval_dataloader = dataloader = shard_for_evaluation(dataloader, trainer.accelerator.device)
    # Not the DDP wrapper: its forward may synchronise buffers, and ranks may have different numbers of batches.
    model = trainer.model
    was_training = model.training
    model.eval()
    losses, counts, results = [], [], []
    for inputs in dataloader:
        counts.append(find_batch_size(inputs))
        loss, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        if loss is not None:
            losses.append(loss)
        if logits is not None or labels is not None:
            results.append(send_to_device((logits, labels), "cpu"))
        trainer.call_event("on_prediction_step")
    model.train(was_training)

    # All at once: reading each loss where it arises would wait for the device in every batch.
    means = torch.stack(losses).tolist() if losses else []
    loss_sum = math.fsum(mean * count for mean, count in zip(means, counts, strict=False))
    totals = gather_object([(loss_sum, len(losses), sum(counts), len(results))])
    loss_sum, num_losses, num_samples, _ = (sum(column) for column in zip(*totals, strict=True))
    # Batch i of rank r is number i · num_processes + r of the whole. One round at a time, because the collective may
    # pass through the device's memory: that bounds it to one batch of each rank.
    rounds = max(number for *_, number in totals)
    batches = [batch for i in range(rounds) for batch in gather_object(results[i : i + 1])]
    predictions, label_ids = (_join(list(column)) for column in zip(*batches, strict=True)) if batches else (None, None)

    metrics = {"loss": loss_sum / num_samples} if num_losses else {}
    if trainer.compute_metrics is not None and predictions is not None and label_ids is not None:
        metrics |= trainer.compute_metrics(EvalPrediction(predictions, label_ids))
    metrics = {name.removeprefix(f"{prefix}_"): v.item() if hasattr(v, "item") else v for name, v in metrics.items()}
    num_steps = math.ceil(num_samples / trainer.args.per_device_eval_batch_size / trainer.accelerator.num_processes)
    metrics |= speed_metrics(start_time, num_samples, num_steps)
    return PredictionOutput(predictions, label_ids, {f"{prefix}_{name}": value for name, value in metrics.items()})


def speed_metrics(start_time: float, num_samples: int, num_steps: int) -> dict[str, float]:
    """Seconds since `start_time` and, over them, samples (of all ranks) and steps per second."""
    runtime = time.time() - start_time
    rates = {"samples_per_second": round(num_samples / runtime, 3), "steps_per_second": round(num_steps / runtime, 3)}
    return {"runtime": round(runtime, 4)} | rates


def _join(parts: list) -> Any:
    """Concatenate along the first dimension, element by element in tuples and dicts; tensors become arrays."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_join(list(column)) for column in zip(*parts, strict=True))
    # NumPy has no bfloat16.
    return np.concatenate([(part.float() if part.dtype == torch.bfloat16 else part).numpy() for part in parts])
