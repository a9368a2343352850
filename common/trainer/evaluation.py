"""The loop behind evaluate and predict.

Each rank works through its own batches. What they gave is put into the order of the dataset at the end, where samples
that were repeated to even the ranks out are cut off.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.accelerator import Accelerator
from common.accelerator.utils import gather_object, send_to_device
from common.trainer import loading
from common.trainer.batches import count_samples

# Predictions of batches with different second dimensions, such as lengths of texts, are filled up with this value.
PADDING = -100
# At most so many bytes of predictions, or those of one batch if they are more, are gathered from each rank at once.
GATHERED_BYTES = 32 * 2**20


class EvalPrediction(NamedTuple):
    """What `compute_metrics` gets: NumPy arrays, or tuples or dicts of them, with a row for each sample in order."""

    predictions: Any
    label_ids: Any


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns; `label_ids` is None where the samples have no labels."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]


class EvalLoopOutput(NamedTuple):
    """What one pass over an evaluation set gives."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int


class BatchLoss(NamedTuple):
    """The mean loss of one batch of `rows` samples, those included that are there only to even out the ranks."""

    rows: int
    loss: Any


class BatchPrediction(NamedTuple):
    """What a model said of one batch: arrays, or tuples or dicts of them, with a row for each sample."""

    logits: Any
    labels: Any


def evaluation_loop(
    trainer: Any,
    dataloader: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
    metric_key_prefix: str,
) -> EvalLoopOutput:
    """Run `trainer.prediction_step` over a loader and put the ranks' results together; all ranks get them.

    The loss is the mean over the samples, of which each counts with the mean loss of its batch.
    """
    accelerator = trainer.accelerator
    args = trainer.args
    is_prepared = loading.is_prepared(dataloader)
    trainer.eval_dataloader = dataloader
    model = trainer.prepare_model_for_evaluation()
    model.eval()
    losses = []
    predictions = []
    rows_of_last_step = None
    num_observed = 0
    for inputs in loading.read_batches(dataloader, accelerator.device):
        rows = count_samples(inputs) or 0
        num_observed += rows
        loss, prediction = _predict_batch(trainer, model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            losses.append(BatchLoss(rows or args.per_device_eval_batch_size, loss))
        if prediction is not None:
            predictions.append(prediction)
        # A loader that is not prepared repeats nothing, and the accelerator does not know where it ends.
        if is_prepared and accelerator.gradient_state.end_of_dataloader:
            rows_of_last_step = _count_rows_of_last_step(accelerator, args)
        trainer.call_event("on_prediction_step")

    joined = join_predictions(gather_steps(accelerator, predictions), rows_of_last_step)
    prefix = f"{metric_key_prefix}_"
    metrics = {}
    rows_per_batch = args.per_device_eval_batch_size if is_prepared and args.loading.even_batches else None
    sample_losses = join_losses(gather_steps(accelerator, _on_host(losses)), rows_of_last_step, rows_per_batch)
    if sample_losses is not None:
        metrics[f"{prefix}loss"] = mean_loss(sample_losses, args.logging_nan_inf_filter)
    if trainer.compute_metrics is not None and joined.logits is not None and joined.labels is not None:
        computed = trainer.compute_metrics(EvalPrediction(joined.logits, joined.labels))
        _add_metrics(metrics, as_numbers(computed), prefix)
    return EvalLoopOutput(joined.logits, joined.labels, metrics, _dataset_length(dataloader) or num_observed)


def _add_metrics(metrics: dict[str, Any], computed: dict[str, Any], prefix: str) -> None:
    """Add metrics to those of the Trainer, with its prefix. A "loss" among them replaces the Trainer's."""
    for name, value in computed.items():
        if name.startswith(prefix):
            metrics.setdefault(name, value)
        else:
            metrics[prefix + name] = value


def _predict_batch(
    trainer: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
) -> tuple[Tensor | None, BatchPrediction | None]:
    """The loss of a batch, which stays on the device, and what else is kept of it, which leaves the device at once."""
    loss, logits, labels = trainer.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
    if logits is not None and trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    if logits is None and labels is None:
        return loss, None
    logits = as_arrays(send_to_device(logits, "cpu"))
    labels = as_arrays(send_to_device(labels, "cpu"))
    return loss, BatchPrediction(logits, labels)


def _count_rows_of_last_step(accelerator: Accelerator, args: Any) -> int | None:
    """How many samples of the last step, over all ranks, are no repetitions; None if none is repeated.

    The accelerator knows it while the last batch is at hand: it cuts what is gathered then. Where ranks may have
    different numbers of batches (`even_batches` off) nothing is repeated, and gathering now would wait for a rank
    that has no batch.
    """
    if accelerator.num_processes > 1 and not args.loading.even_batches:
        return None
    own = torch.zeros(args.per_device_eval_batch_size, device=accelerator.device)
    rows = len(accelerator.gather_for_metrics(own))
    return rows if rows < len(own) * accelerator.num_processes else None


def _dataset_length(dataloader: Any) -> int | None:
    dataset: Any = getattr(dataloader, "dataset", None)
    try:
        return len(dataset)
    except TypeError:  # a stream, or no dataset at all
        return None


def gather_steps(accelerator: Accelerator, own: list) -> list[list]:
    """What all ranks have of each step of a loop, in the order of the ranks. All ranks must call this.

    A rank with fewer steps than the others has nothing in the last ones. Steps are gathered in chunks of at most
    `GATHERED_BYTES` a rank, because the collective may pass through the device's memory.

    Args:
        own: what this rank has, an entry for each step.
    """
    own_bytes = sum(count_bytes(entry) for entry in own)
    lengths = gather_object([len(own)])
    num_steps = max(lengths)
    if num_steps == 0:
        return []
    most_bytes = max(gather_object([own_bytes]))
    num_chunks = min(num_steps, 1 + most_bytes // GATHERED_BYTES)
    steps_per_chunk = -(-num_steps // num_chunks)
    missing = object()
    steps = []
    for start in range(0, num_steps, steps_per_chunk):
        of_ranks = gather_object([own[start : start + steps_per_chunk]])
        for of_step in zip_longest(*of_ranks, fillvalue=missing):
            steps.append([entry for entry in of_step if entry is not missing])
    return steps


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, tuple | list):
        for part in data:
            yield from _leaves(part)
    else:
        yield data


def _sequence_like(example: tuple | list, parts: list) -> tuple | list:
    return parts if isinstance(example, list) else tuple(parts)


def count_bytes(data: Any) -> int:
    """The bytes of the arrays in a nested structure."""
    return sum(leaf.nbytes for leaf in _leaves(data) if isinstance(leaf, np.ndarray))


def _on_host(losses: list[BatchLoss]) -> list[BatchLoss]:
    """The losses as NumPy numbers. They are read at once, because each read waits for the device."""
    if not losses:
        return []
    stacked = torch.stack([batch.loss for batch in losses])
    numbers = as_arrays(stacked.cpu())
    return [BatchLoss(batch.rows, number) for batch, number in zip(losses, numbers, strict=True)]


def join_losses(
    steps: list[list[BatchLoss]], rows_of_last_step: int | None, rows_per_batch: int | None
) -> np.ndarray | None:
    """The loss of each sample, which is the mean loss of its batch, in the order of the dataset; None without losses.

    Args:
        rows_of_last_step: where repetitions begin in the last step, which is cut off there.
        rows_per_batch: how often every batch counts; None if each counts as often as it has samples.
    """
    if not steps:
        return None
    joined = []
    for step in steps:
        counts = [batch.rows for batch in step]
        if rows_per_batch is not None:
            counts = [rows_per_batch] * len(step)
        joined.append(np.repeat([batch.loss for batch in step], counts))
    joined[-1] = joined[-1][:rows_of_last_step]
    return np.concatenate(joined)


def mean_loss(losses: np.ndarray, filter_not_finite: bool) -> float:
    """The mean of `losses`; with the filter of those that are finite, if there are any."""
    finite = np.isfinite(losses)
    if filter_not_finite and finite.any():
        losses = losses[finite]
    return losses.mean().item()


def join_predictions(steps: list[list[BatchPrediction]], rows_of_last_step: int | None) -> BatchPrediction:
    """The predictions of all steps in the order of the dataset, cut off where repetitions begin."""
    if not steps:
        return BatchPrediction(None, None)
    *whole, last = steps
    batches = [batch for step in whole for batch in step]
    last_logits = first_rows(concatenate([batch.logits for batch in last]), rows_of_last_step)
    last_labels = first_rows(concatenate([batch.labels for batch in last]), rows_of_last_step)
    logits = concatenate([batch.logits for batch in batches] + [last_logits])
    labels = concatenate([batch.labels for batch in batches] + [last_labels])
    return BatchPrediction(logits, labels)


def as_arrays(data: Any) -> Any:
    """Nested tensors on the CPU as NumPy arrays of at least one dimension; bfloat16, which NumPy lacks, as float32."""
    if isinstance(data, Mapping):
        return {key: as_arrays(part) for key, part in data.items()}
    if isinstance(data, tuple | list):
        return _sequence_like(data, [as_arrays(part) for part in data])
    if isinstance(data, Tensor):
        if data.dtype == torch.bfloat16:
            data = data.float()
        return np.atleast_1d(data.numpy())
    return data


def concatenate(parts: list) -> Any:
    """Nested arrays joined along their first dimension; along the second they are filled up to the longest."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        columns = zip(*parts, strict=True)
        return _sequence_like(first, [concatenate(list(column)) for column in columns])
    if first.ndim > 1:
        longest = max(part.shape[1] for part in parts)
        parts = [_padded(part, longest) for part in parts]
    return np.concatenate(parts)


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    if array.shape[1] == length:
        return array
    shape = (array.shape[0], length, *array.shape[2:])
    padded = np.full(shape, PADDING, dtype=array.dtype)
    padded[:, : array.shape[1]] = array
    return padded


def first_rows(data: Any, rows: int | None) -> Any:
    """The first `rows` of nested arrays; all of them for None."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {key: first_rows(part, rows) for key, part in data.items()}
    if isinstance(data, tuple | list):
        return _sequence_like(data, [first_rows(part, rows) for part in data])
    return data[:rows]


def as_numbers(metrics: Any) -> Any:
    """Nested metrics with NumPy's numbers and tensors of one element as Python's numbers; arrays stay what they are."""
    if isinstance(metrics, Mapping):
        return {name: as_numbers(value) for name, value in metrics.items()}
    if isinstance(metrics, tuple | list):
        return _sequence_like(metrics, [as_numbers(value) for value in metrics])
    is_one_number = isinstance(metrics, np.generic) or (isinstance(metrics, Tensor) and metrics.numel() == 1)
    return metrics.item() if is_one_number else metrics


def speed_metrics(prefix: str, start_time: float, num_samples: float, num_steps: int) -> dict[str, float]:
    """Seconds since `start_time` and, over them, samples (of all ranks) and steps per second."""
    runtime = time.time() - start_time
    metrics = {f"{prefix}_runtime": round(runtime, 4)}
    if runtime > 0:
        metrics[f"{prefix}_samples_per_second"] = round(num_samples / runtime, 3)
        metrics[f"{prefix}_steps_per_second"] = round(num_steps / runtime, 3)
    return metrics
