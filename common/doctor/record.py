"""The observations of one rank, as plain values and tensors: what the observers note, and what the checks compare."""

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

Draws = dict[str, list[int]]  # for each random generator fingerprints of its states before something drew from it


@dataclass
class Model:
    """A network that the script has called.

    Attributes:
        wrapped: DistributedDataParallel holds it, or it holds one.
        forwards: calls in training mode with gradients.
        bypassed: those of them that did not come through the wrapper.
        parameters: their number.
        has_module: a part of it is itself called `module`.
        changed: parameters that are not those that were wrapped, or have another device or type.
        without_gradient: parameters to be trained that had no gradient at the first step.
        weights: a part of each parameter after some numbers of steps; after 0, as DDP first trains with it.
        statistics: those of BatchNorm in evaluations, by the number of steps before them.
    """

    title: str
    wrapped: bool = False
    forwards: int = 0
    bypassed: int = 0
    parameters: int = 0
    has_module: bool = False
    changed: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass
class Pass:
    """A pass over a DataLoader.

    Attributes:
        loader: the `id` of the DataLoader.
        size: the number of samples of its data set; below a `Subset`, of the whole one.
        plain: torch's own batch sampler deals out the samples, not one of a library that corrects them later.
        samples: the numbers of the samples read, in order; None where they have none.
        asked: how often a batch was asked for.
        batches: those that came.
        last_batch: the number of samples in the last one.
        forwards: of a network in training, with its batches.
        shares: those of them whose input was one rank's share of the batch, as the script has cut it out.
        contents: a row for each of the first samples, with a fingerprint for each of its tensors.
    """

    loader: int
    size: int | None
    plain: bool
    samples: list[int] | None = field(default_factory=list)
    asked: int = 0
    batches: int = 0
    last_batch: int = 0
    forwards: int = 0
    shares: int = 0
    contents: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True where the data came to their end."""
        return self.asked > self.batches


@dataclass
class Record:
    """The observations of a rank.

    Attributes:
        ended: "whole", "steps" (the wished number), "crash", "stopped" by the doctor; None while it runs.
        crash: one line.
        code: the exit code; that of a signal where it had to be killed.
        last_line: the last that it has printed.
        place: where it was stopped: the line of the script, and the functions that were called from there.
        backend: of the process group, if there was one.
        rates: the learning rates at each optimizer step.
        windows: the forwards before each optimizer step.
        forward_draws: of forwards in training.
        batch_draws: of reading a batch in this process.
        forgotten: parameters that have gradients and are in no optimizer.
        orphans: the number of parameters that are in an optimizer, but in no network, and without gradients.
        saves: for each call of `torch.save` its file, and the keys of the state dicts in it.
        collectives: calls on all ranks, each with the line of the script.
        troubles: errors of the observers.
    """

    rank: int
    ended: str | None = None
    crash: str | None = None
    code: int = 0
    last_line: str = ""
    place: list[str] = field(default_factory=list)
    backend: str | None = None
    steps: int = 0
    rates: list[list[float]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    forward_draws: Draws = field(default_factory=dict)
    batch_draws: Draws = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)
    orphans: int = 0
    models: list[Model] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    saves: list[tuple[str, list[str]]] = field(default_factory=list)
    collectives: list[tuple[str, str]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def write(record: Record, path: Path) -> None:
    """Write a record as dicts: its classes are of a `common` that the script may have replaced by its own."""
    values = dict(vars(record))
    values["models"] = [vars(model) for model in record.models]
    values["passes"] = [vars(one) for one in record.passes]
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(values))
    os.replace(new, path)


def read(path: Path) -> Record:
    record = Record(**pickle.loads(path.read_bytes()))
    record.models = [Model(**values) for values in record.models]  # type: ignore
    record.passes = [Pass(**values) for values in record.passes]  # type: ignore
    return record
