"""From the batches of an evaluation, which each rank has worked through by itself, to one result.

The results of the ranks are gathered at the end and put into the order of the data set. Samples that were repeated to
even the ranks out are cut off.
"""

import time
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.accelerator.utils import gather_object, send_to_device
from common.nested import map_nested, zip_nested

# Predictions of batches with different second dimensions, such as lengths of texts, are filled up with this value.
PADDING = -100
# Batches of each rank that are gathered at once.
STEPS_AT_ONCE = 8


class EvalPrediction(NamedTuple):
    """The argument of `compute_metrics`: NumPy arrays, or tuples or dicts of them, with a row for each sample in order.

    It can be taken apart: `predictions, labels = prediction`.
    """

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
    """What an evaluation has of one batch: nested tensors or, on the CPU, NumPy arrays; None for what there is not.

    Attributes:
        rows: its samples, those included that are there only to even out the ranks.
        num_real: the samples without those; None in a step in which no rank has any of those.
        loss: the mean over them.
        logits, labels: the model's output and the labels, with a row for each sample.
    """

    rows: int
    num_real: int | None
    loss: Any
    logits: Any
    labels: Any


class Results:
    """The results of a rank's batches, which leave its device batch by batch.

    A GPU computes the next batch while the CPU waits for the results of one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host: list[BatchResult] = []
        self._leaving: BatchResult | None = None
        self._arrival: torch.cuda.Event | None = None

    def add(self, result: BatchResult) -> None:
        """Send the result of a batch to the CPU, and take that of the batch before."""
        self._take()
        leaves_gpu = self._device.type == "cuda"
        self._leaving = send_to_device(result, "cpu", leaves_gpu)
        if leaves_gpu:
            self._arrival = torch.cuda.current_stream(self._device).record_event()

    def on_host(self) -> list[BatchResult]:
        """All of them as NumPy arrays, in the order of the batches."""
        self._take()
        return self._on_host

    def _take(self) -> None:
        if self._leaving is None:
            return
        if self._arrival is not None:
            self._arrival.synchronize()
        self._on_host.append(as_arrays(self._leaving))
        self._leaving = None


@dataclass(frozen=True)
class GatheredBatches:
    """The batches of all ranks, from which the repetitions at the end of the last step are to be cut off.

    Attributes:
        steps: for each step of the loop the batches of the ranks, in the order of the ranks, which is that of the data
            set. A rank with fewer steps than the others has nothing in the last ones.
        rows_of_last_step: the samples of the last step without repetitions; None if it has none of these.
    """

    steps: list[list[BatchResult]]
    rows_of_last_step: int | None

    def rows(self, name: str) -> Any:
        """The "logits" or "labels" of all samples, in the order of the data set."""
        if not self.steps:
            return None
        *whole, last = self.steps
        parts = [getattr(batch, name) for step in whole for batch in step]
        last_part = concatenate([getattr(batch, name) for batch in last])
        parts.append(first_rows(last_part, self.rows_of_last_step))
        return concatenate(parts)

    def losses(self, rows_per_batch: int | None) -> np.ndarray | None:
        """The loss of each sample, which is the mean loss of its batch, in the order of the data set; None without.

        Args:
            rows_per_batch: how often every batch counts; None if each counts as often as it has samples.
        """
        joined = []
        for number, step in enumerate(self.steps, start=1):
            batches = [batch for batch in step if batch.loss is not None]
            if batches:
                counts = [rows_per_batch or batch.rows for batch in batches]
                losses = np.repeat(np.concatenate([batch.loss for batch in batches]), counts)
                if number == len(self.steps):
                    losses = losses[: self.rows_of_last_step]
                joined.append(losses)
        return np.concatenate(joined) if joined else None


def gather_batches(own: list[BatchResult]) -> GatheredBatches:
    """The batches of all ranks. All ranks must call this.

    Only some steps are gathered at a time, because the collective may pass through the device's memory.
    """
    num_steps = max(gather_object([len(own)]))
    steps = []
    for start in range(0, num_steps, STEPS_AT_ONCE):
        of_ranks = gather_object([own[start : start + STEPS_AT_ONCE]])
        for of_step in zip_longest(*of_ranks):
            steps.append([batch for batch in of_step if batch is not None])
    rows_of_last_step = None
    if steps and steps[-1][0].num_real is not None:
        rows_of_last_step = sum(batch.num_real for batch in steps[-1])
    return GatheredBatches(steps, rows_of_last_step)


def mean_loss(losses: np.ndarray, filter_not_finite: bool) -> float:
    """The mean of `losses`; with the filter of those that are finite, if there are any."""
    finite = np.isfinite(losses)
    if filter_not_finite and finite.any():
        losses = losses[finite]
    return losses.mean().item()


def as_arrays(data: Any) -> Any:
    """Nested tensors on the CPU as NumPy arrays of at least one dimension; bfloat16, which NumPy lacks, as float32."""

    def as_array(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dtype == torch.bfloat16:
            leaf = leaf.float()
        # A copy: torch copies into pinned memory where it does not wait, and a whole evaluation does not belong there.
        return np.array(leaf.numpy(), ndmin=1)

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
