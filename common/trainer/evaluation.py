"""From the batches of an evaluation, which each rank has worked through by itself, to one result.

The results of the ranks are gathered at the end and put into the order of the data set. Samples that were repeated to
even the ranks out are cut off.
"""

import time
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.accelerator import Accelerator
from common.accelerator.utils import gather_object, send_to_device
from common.nested import leaves, map_nested, zip_nested

# Predictions of batches with different second dimensions, such as lengths of texts, are filled up with this value.
PADDING = -100
# At most so many bytes of predictions, or those of one batch if they are more, are gathered from each rank at once.
GATHERED_BYTES = 32 * 2**20


class EvalPrediction(NamedTuple):
    """The argument of `compute_metrics`: NumPy arrays, or tuples or dicts of them, with a row for each sample in order.

    It can be taken apart: `predictions, labels = prediction`.
    """

    predictions: Any
    label_ids: Any

    @property
    def inputs(self) -> None:
        """None: the original has the inputs here where its argument `include_for_metrics` asks for them."""

    @property
    def losses(self) -> None:
        """None: see `inputs`."""


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


class BatchLoss(NamedTuple):
    """The mean loss of one batch of `rows` samples, those included that are there only to even out the ranks."""

    rows: int
    loss: Any


class BatchPrediction(NamedTuple):
    """A model's output for one batch and its labels: arrays, or tuples or dicts of them, with a row for each sample."""

    logits: Any
    labels: Any


class _Copy(NamedTuple):
    """A batch's output and labels on the CPU, or on their way there: they have come when the event has happened."""

    logits: Any
    labels: Any
    arrival: torch.cuda.Event | None


class Predictions:
    """The predictions of a rank's batches, which leave its device batch by batch.

    A GPU computes the next batch while the CPU waits for the predictions of one.
    """

    def __init__(self) -> None:
        self._on_host: list[BatchPrediction] = []
        self._leaving: _Copy | None = None

    def add(self, logits: Any, labels: Any) -> None:
        """Send a batch's output and labels to the CPU, and take those of the batch before."""
        self._take()
        tensors = [leaf for leaf in leaves([logits, labels]) if isinstance(leaf, Tensor)]
        on_gpu = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        non_blocking = bool(on_gpu)
        logits = send_to_device(logits, "cpu", non_blocking)
        labels = send_to_device(labels, "cpu", non_blocking)
        arrival = torch.cuda.current_stream(on_gpu[0].device).record_event() if on_gpu else None
        self._leaving = _Copy(logits, labels, arrival)
        if arrival is None:
            self._take()

    def on_host(self) -> list[BatchPrediction]:
        """All of them as NumPy arrays, in the order of the batches."""
        self._take()
        return self._on_host

    def _take(self) -> None:
        if self._leaving is None:
            return
        logits, labels, arrival = self._leaving
        self._leaving = None
        if arrival is not None:
            arrival.synchronize()
            # torch copies into pinned memory where it does not wait. A whole evaluation does not belong there.
            logits = map_nested(_clone_tensor, logits)
            labels = map_nested(_clone_tensor, labels)
        self._on_host.append(BatchPrediction(as_arrays(logits), as_arrays(labels)))


def _clone_tensor(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def losses_on_host(losses: list[BatchLoss]) -> list[BatchLoss]:
    """The losses as NumPy numbers. They are read at once, because each read waits for the device."""
    if not losses:
        return []
    stacked = torch.stack([batch.loss for batch in losses])
    numbers = as_arrays(stacked.cpu())
    return [BatchLoss(batch.rows, number) for batch, number in zip(losses, numbers, strict=True)]


def gather_steps(accelerator: Accelerator, own: list) -> list[list]:
    """The entries of all ranks for each step of a loop, in the order of the ranks. All ranks must call this.

    A rank with fewer steps than the others has nothing in the last ones. Steps are gathered in chunks of at most
    `GATHERED_BYTES` a rank, because the collective may pass through the device's memory.

    Args:
        own: of this rank, an entry for each step.
    """
    own_bytes = sum(leaf.nbytes for leaf in leaves(own) if isinstance(leaf, np.ndarray))
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

    def as_array(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype == torch.bfloat16:
            leaf = leaf.float()
        return np.atleast_1d(leaf.numpy())

    return map_nested(as_array, data)


def concatenate(parts: list) -> Any:
    """Nested arrays joined along their first dimension; along the second they are filled up to the longest."""

    def join(*arrays: Any) -> Any:
        if arrays[0] is None:
            return None
        if arrays[0].ndim > 1:
            longest = max(array.shape[1] for array in arrays)
            return np.concatenate([_padded(array, longest) for array in arrays])
        return np.concatenate(arrays)

    return zip_nested(join, *parts)


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    if array.shape[1] == length:
        return array
    shape = (array.shape[0], length, *array.shape[2:])
    padded = np.full(shape, PADDING, dtype=array.dtype)
    padded[:, : array.shape[1]] = array
    return padded


def first_rows(data: Any, rows: int | None) -> Any:
    """The first `rows` of nested arrays; all of them for None."""

    def first(array: Any) -> Any:
        return None if array is None else array[:rows]

    return map_nested(first, data)


def as_numbers(metrics: Any) -> Any:
    """Nested metrics with NumPy's numbers and tensors of one element as Python's numbers; arrays stay what they are."""

    def as_number(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item()
        return value

    return map_nested(as_number, metrics)


def speed_metrics(prefix: str, start_time: float, num_samples: float, num_steps: int) -> dict[str, float]:
    """Seconds since `start_time` and, over them, samples (of all ranks) and steps per second."""
    runtime = time.time() - start_time
    metrics = {f"{prefix}_runtime": round(runtime, 4)}
    if runtime > 0:
        metrics[f"{prefix}_samples_per_second"] = round(num_samples / runtime, 3)
        metrics[f"{prefix}_steps_per_second"] = round(num_steps / runtime, 3)
    return metrics
