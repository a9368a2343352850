"""The observations of one rank, as plain values and tensors: what the watcher writes, and what the checks read."""

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

Generators = dict[str, int]  # fingerprints of the states of the random generators
Draw = tuple[Generators, Generators]  # before and after something that may draw


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
        reduced: gradients that the script itself all-reduced in the first steps, after those of DDP.
        multiplied: those of them that were then as many times as large as there are ranks.
        weights: a part of each parameter after some numbers of steps; after 0, as DDP first trains with it.
        statistics: those of BatchNorm in evaluations, by the number of steps before them.
        draws: around forwards in training.
    """

    title: str
    wrapped: bool = False
    forwards: int = 0
    bypassed: int = 0
    parameters: int = 0
    has_module: bool = False
    changed: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    reduced: int = 0
    multiplied: int = 0
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)


@dataclass
class Pass:
    """A pass over a DataLoader.

    Attributes:
        loader: the number of the DataLoader.
        size: the number of samples of its data set; below a `Subset`, of the whole one.
        plain: torch's own batch sampler deals out the samples, not one of a library that corrects them later.
        each_once: its sampler is one of torch's that give no number twice.
        samples: the numbers of the samples read, in order; None where they have none.
        batches: those that were read.
        read: the number of samples read, also where they have none themselves.
        last_batch: how many of them came last, in one batch.
        complete: it was read to its end.
        forwards: of a network in training, with its batches.
        in_parallel: those of them that were of a network under DistributedDataParallel.
        shares: those of them whose input was one rank's share of the batch, as the script has cut it out.
        contents: a row for each of the first samples, with a fingerprint for each of its tensors.
        draws: around the reading of a batch in this process.
    """

    loader: int
    size: int | None
    plain: bool
    each_once: bool = False
    samples: list[int] | None = field(default_factory=list)
    batches: int = 0
    read: int = 0
    last_batch: int = 0
    complete: bool = False
    forwards: int = 0
    in_parallel: int = 0
    shares: int = 0
    contents: list[tuple[int, ...]] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


@dataclass
class Record:
    """The observations of a rank.

    Attributes:
        ended: "whole", "steps" (the wished number), "crash", "stopped" by the doctor; None while it runs.
        crash: one line.
        place: where it was stopped: the line of the script, and the functions that were called from there.
        backend: of the process group, if there was one.
        rates: the learning rates at each optimizer step.
        windows: the forwards before each optimizer step.
        held: the number of parameters in optimizers.
        forgotten: parameters that have gradients and are in no optimizer.
        orphans: the number of parameters that are in an optimizer, but in no network, and without gradients.
        saves: for each call of `torch.save` its file, and the keys of the state dicts in it.
        collectives: calls on all ranks, each with the line of the script.
        troubles: errors of the watcher.
    """

    rank: int
    ended: str | None = None
    crash: str | None = None
    place: list[str] = field(default_factory=list)
    backend: str | None = None
    steps: int = 0
    rates: list[list[float]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    held: int = 0
    forgotten: list[str] = field(default_factory=list)
    orphans: int = 0
    models: list[Model] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    saves: list[tuple[str, list[str]]] = field(default_factory=list)
    collectives: list[tuple[str, str]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


PARTS = {"models": Model, "passes": Pass}


def write(record: Record, path: Path) -> None:
    """Write a record as dicts: its classes are of a `common` that the script may have replaced by its own."""
    values = dict(vars(record))
    for name in PARTS:
        values[name] = [vars(part) for part in values[name]]
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(values))
    os.replace(new, path)


def read(path: Path) -> Record:
    values = pickle.loads(path.read_bytes())
    for name, kind in PARTS.items():
        values[name] = [kind(**part) for part in values[name]]
    return Record(**values)
