"""The result of an evaluation, which is put together from the batches that each rank has worked through by itself.

The results of the ranks are gathered at the end and put into the order of the data set. Samples that were repeated to
even the ranks out are left out.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.accelerator.utils import gather_object, send_to_device
from common.nested import honor_type, map_nested
from common.trainer import loading, optimization
from common.trainer.loading import BatchRows
from common.trainer.training_args import TrainingArguments

# Predictions of batches with different dimensions, such as lengths of texts, are filled up with this value.
PADDING = -100
# Batches of each rank that are gathered at once: the collective may pass through the device's memory.
BATCHES_AT_ONCE = 8


class EvalPrediction(NamedTuple):
    """The argument of `compute_metrics`: arrays, or tuples or dicts of them, with a row for each sample in order."""

    predictions: Any
    label_ids: Any


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`; `label_ids` is None where the samples have no labels."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]


class EvalLoopOutput(NamedTuple):
    """The result of one pass over an evaluation set."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int


class BatchResult(NamedTuple):
    """The result of a batch of an evaluation: nested tensors or, on the CPU, NumPy arrays; None where there is none.

    `loss` is the mean over the rows; `logits` and `labels` are the model's output and the labels.
    """

    rows: BatchRows
    loss: Any
    logits: Any
    labels: Any


def run(trainer: Any, loader: Any, prefix: str, **options: Any) -> EvalLoopOutput:
    """One `evaluation_loop` of the trainer with `options`, and its speed; an override may have made the loader."""
    start_time = time.time()
    loader = loading.deal_out(loader, trainer.accelerator)
    output = trainer.evaluation_loop(loader, metric_key_prefix=prefix, **options)
    samples_per_step = trainer.args.per_device_eval_batch_size
    if not trainer.accelerator.dataloader_config.split_batches:
        samples_per_step *= trainer.accelerator.num_processes
    num_steps = math.ceil(output.num_samples / samples_per_step)
    output.metrics.update(speed_metrics(prefix, start_time, output.num_samples, num_steps))
    return output


def set_up_model(trainer: Any) -> nn.Module:
    """The trainer's model in the mode and precision of an evaluation, prepared unless a training has done it.

    It is the model without DDP, whose forward may be a collective: some ranks may have fewer batches than others.
    """
    model = trainer.model
    if trainer.progress is None:  # There was no training.
        trainer.accelerator.forget_model(model)  # another Trainer may have prepared it in another precision
        model = trainer.accelerator.prepare_model(model, evaluation_mode=True)  # compiled, if the arguments say so
    if trainer.args.fp16_full_eval and not trainer.is_in_train:
        model.to(torch.float16)  # As in the original, it stays so.
    elif trainer.args.bf16_full_eval and not trainer.is_in_train:
        model.to(torch.bfloat16)
    model.eval()
    optimization.set_mode(trainer.optimizer, "eval")
    return model


def predict_batches(
    trainer: Any, model: nn.Module, loader: Any, loss_only: bool, ignore_keys: list[str] | None
) -> Iterator[BatchResult]:
    """The results of the loader's batches, each of which is computed when it is asked for."""
    batch_size = trainer.args.per_device_eval_batch_size
    for inputs, rows in loading.read_eval_batches(loader, batch_size, trainer.accelerator):
        loss, logits, labels = trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        yield BatchResult(rows, loss, logits, labels)
        trainer.call_event("on_prediction_step")


def to_host(results: Iterable[BatchResult], device: torch.device) -> list[BatchResult]:
    """The results of a rank's batches as NumPy arrays, each moved to the CPU while a GPU computes the next one."""
    if device.type != "cuda":
        return [map_nested(as_array, send_to_device(result, "cpu")) for result in results]

    def read(copy: BatchResult, arrival: torch.cuda.Event) -> BatchResult:
        arrival.synchronize()
        return map_nested(as_array, copy)

    arrays = []
    copies = []
    for result in results:
        copy = send_to_device(result, "cpu", non_blocking=True)
        copies.append((copy, torch.cuda.current_stream(device).record_event()))
        if len(copies) > 1:  # the copy before has had the time of a batch to arrive
            arrays.append(read(*copies.pop(0)))
    return arrays + [read(*each) for each in copies]


def as_array(leaf: Any) -> Any:
    """A tensor on the CPU as a NumPy array; bfloat16, which NumPy lacks, as float32."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.float()
    # A copy: torch copies into pinned memory where it does not wait, and a whole evaluation does not belong there.
    return np.array(leaf.numpy())


def gather_batches(own: list[BatchResult]) -> list[BatchResult]:
    """The batches of all ranks in which there are real samples, in the order of the data set. All ranks call this."""
    most_batches = max(gather_object([len(own)]))
    gathered = []
    for start in range(0, most_batches, BATCHES_AT_ONCE):
        of_ranks = gather_object([own[start : start + BATCHES_AT_ONCE]])
        for of_step in zip_longest(*of_ranks):  # a rank may have fewer batches than the others
            gathered += [batch for batch in of_step if batch is not None and batch.rows.num_real > 0]
    return gathered


def summarize(
    gathered: list[BatchResult], compute_metrics: Callable | None, args: TrainingArguments, prefix: str
) -> EvalLoopOutput:
    """Predictions, labels and metrics of all samples, of the batches of all ranks."""
    rows_of_batches = [batch.rows for batch in gathered]
    predictions = concatenate([batch.logits for batch in gathered], rows_of_batches)
    label_ids = concatenate([batch.labels for batch in gathered], rows_of_batches)
    metrics: dict[str, Any] = {}
    if compute_metrics is not None and predictions is not None and label_ids is not None:
        computed = compute_metrics(EvalPrediction(predictions, label_ids))
        metrics = map_nested(as_number, dict(computed))
    loss = mean_loss(gathered, args.per_device_eval_batch_size, args.logging_nan_inf_filter)
    if loss is not None:
        metrics[f"{prefix}loss"] = loss
    num_samples = sum(rows.num_real for rows in rows_of_batches)
    return EvalLoopOutput(predictions, label_ids, with_prefix(metrics, prefix), num_samples)


def mean_loss(batches: list[BatchResult], batch_size: int, filter_not_finite: bool) -> float | None:
    """The mean over all samples, each of which counts with the mean loss of its batch; None if there is no loss.

    Batches of 3 samples and of 1, with the mean losses 0.5 and 0.9, give (0.5 + 0.5 + 0.5 + 0.9) / 4 = 0.6. With
    `filter_not_finite`, samples whose loss is NaN or infinite are left out, unless there are no others.
    """
    batches = [batch for batch in batches if batch.loss is not None]
    if not batches:
        return None
    counts = [batch.rows.num_real for batch in batches]
    has_short_step = any(batch.rows.in_short_step for batch in batches)
    if not has_short_step and len(set(counts)) == 1:
        # Batches of one size may be counted any number of times, but this number decides how the mean is rounded.
        # `transformers` counts each of them `batch_size` times, even if they are smaller.
        counts = [batch_size] * len(batches)
    losses = np.repeat([batch.loss.mean() for batch in batches], counts)
    finite = np.isfinite(losses)
    if filter_not_finite and finite.any():
        losses = losses[finite]
    return losses.mean().item()


def concatenate(parts: list, rows_of_batches: list[BatchRows]) -> Any:
    """The logits or labels of the batches, `parts`, joined along their first dimension, and filled up along the others.

    Lists with an entry for each sample, such as the boxes in an image, become one list with an entry for each sample.
    """
    if not parts or parts[0] is None:
        return None
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts], rows_of_batches) for key in first}
    if isinstance(first, tuple | list) and not _are_entries(parts, rows_of_batches):
        joined = [concatenate(list(outputs), rows_of_batches) for outputs in zip(*parts, strict=True)]
        return honor_type(first, joined)
    if isinstance(first, list):
        parts = [rows.real_part(part) for part, rows in zip(parts, rows_of_batches, strict=True)]
        return list(chain(*parts))
    arrays = [rows.real_part(np.atleast_1d(part)) for part, rows in zip(parts, rows_of_batches, strict=True)]
    longest = np.max([array.shape for array in arrays], axis=0)[1:]
    return np.concatenate([_filled_up(array, (len(array), *longest)) for array in arrays])


def _are_entries(parts: list, rows_of_batches: list[BatchRows]) -> bool:
    """True for lists with an entry for each sample; False for several outputs, each with a row for each sample.

    Two batches of 2 samples, as shapes of arrays:

        [(5, 4), (3, 4)], [(2, 4), (2, 4)]      entries: 5, 3, 2 and 2 boxes in an image
        [(2, 10), (2, 7)], [(2, 10), (2, 7)]    two outputs
    """
    found_entry = False
    for part, rows in zip(parts, rows_of_batches, strict=True):
        if isinstance(part, tuple) or len(part) != rows.num_rows:
            return False
        for item in part:
            may_be_output = isinstance(item, np.ndarray) and item.shape[:1] == (rows.num_rows,)
            found_entry = found_entry or not may_be_output
    return found_entry


def _filled_up(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape == shape:
        return array
    # An unsigned number cannot be negative. As in torch, it becomes the one that has the same bits.
    filled = np.full(shape, np.array(PADDING).astype(array.dtype))
    filled[tuple(map(slice, array.shape))] = array
    return filled


def as_number(value: Any) -> Any:
    """A metric that is a number of NumPy, or a tensor of one element, as Python's number; arrays stay what they are."""
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if is_number else value


def with_prefix(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Metrics whose names all begin with `prefix`: a "loss" of the script replaces the "eval_loss" of the Trainer."""
    named = {name: value for name, value in metrics.items() if name.startswith(prefix)}
    others = {f"{prefix}{name}": value for name, value in metrics.items() if name not in named}
    return named | others


def speed_metrics(prefix: str, start_time: float, num_samples: float, num_steps: int) -> dict[str, float]:
    """Seconds since `start_time` and, over them, samples (of all ranks) and steps per second."""
    runtime = time.time() - start_time
    metrics = {f"{prefix}_runtime": round(runtime, 4)}
    if runtime > 0:
        metrics[f"{prefix}_samples_per_second"] = round(num_samples / runtime, 3)
        metrics[f"{prefix}_steps_per_second"] = round(num_steps / runtime, 3)
    return metrics
