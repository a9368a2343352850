"""The observations of one rank as plain values and tensors. The observers write them, and the checks compare them."""

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

T = TypeVar("T")
RECORD = "record.pickle"  # in the folder of the rank
End = Literal["whole", "steps", "crash", "stopped"]
Draws = dict[str, list[int]]  # for each random generator fingerprints of its states before something drew from it


@dataclass
class Network:
    """A network that the script has called.

    Attributes:
        kind: the name of its class.
        parameter_count: parameters, each of which is a tensor.
        has_module: a part of it is itself called `module`.
        wrapped: DistributedDataParallel holds it, or it holds one.
        forwards: calls in training mode with gradients.
        past_wrapper: those of them that did not come through the wrapper.
        changed: parameters that are not those that were wrapped, or have another device or type.
        without_gradient: parameters to be trained that had no gradient at the first step.
        weights: a part of each parameter after some numbers of steps; after 0, as DDP first trains with it.
        statistics: those of BatchNorm in evaluations, by the number of steps before them.
    """

    kind: str
    parameter_count: int = 0
    has_module: bool = False
    wrapped: bool = False
    forwards: int = 0
    past_wrapper: int = 0
    changed: list[str] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass
class Epoch:
    """A pass over a DataLoader, in training or in evaluation.

    Attributes:
        loader: the `id` of the DataLoader.
        size: the number of samples of its data set; below a `Subset`, of the whole one.
        plain: torch's own batch sampler deals out the samples, not one of a library that corrects them later.
        samples: the numbers of the samples read, in order; None where they have none.
        batches: those that came.
        complete: the data came to their end.
        last_batch: the number of samples in the last one.
        forwards: of a network in training, with its batches.
        shares: those of them whose input was one rank's share of the batch, as the script has cut it out.
        contents: a row for each of the first samples, with a fingerprint for each of its tensors.
    """

    loader: int
    size: int | None
    plain: bool
    samples: list[int] | None = field(default_factory=list)
    batches: int = 0
    complete: bool = False
    last_batch: int = 0
    forwards: int = 0
    shares: int = 0
    contents: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class Save:
    """A call of `torch.save`: the file, and the keys of the state dicts that went into it."""

    path: str
    keys: list[str]


@dataclass(frozen=True)
class Call:
    """A call of a collective, and the line of the script that made it."""

    name: str
    line: str


@dataclass
class Record:
    """The observations of a rank.

    Attributes:
        ended: "whole" by itself, "steps" as --steps asked, "crash", "stopped" by the doctor; None while it runs.
        crash: the error of a crash, in one line; None where there is only an exit code.
        exit_code: of the process; negative if a signal has ended it.
        last_line: the last that it has printed.
        line: of the script, where it last stood still.
        called: the functions that were called from there, the outermost first.
        backend: of the process group, if there was one.
        steps: of optimizers.
        learning_rates: at each optimizer step, of each parameter group.
        forwards_of_steps: the forwards in training between each optimizer step and the one before.
        forward_draws: of forwards in training.
        batch_draws: of reading a batch in this process.
        clippings: calls that clip gradients.
        clipped_scaled: those of them whose gradients were still multiplied by a loss scale.
        in_no_optimizer: parameters that have gradients and are in no optimizer.
        in_no_network: the number of parameters that are in an optimizer, but in no network, and without gradients.
        collectives: those of the group of all ranks.
        troubles: errors of the observers.
    """

    rank: int
    ended: End | None = None
    crash: str | None = None
    exit_code: int = 0
    last_line: str = ""
    line: str = ""
    called: list[str] = field(default_factory=list)
    backend: str | None = None

    steps: int = 0
    learning_rates: list[list[float]] = field(default_factory=list)
    forwards_of_steps: list[int] = field(default_factory=list)
    forward_draws: Draws = field(default_factory=dict)
    batch_draws: Draws = field(default_factory=dict)
    clippings: int = 0
    clipped_scaled: int = 0
    in_no_optimizer: list[str] = field(default_factory=list)
    in_no_network: int = 0

    networks: list[Network] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    collectives: list[Call] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


PARTS = {"networks": Network, "epochs": Epoch, "saves": Save, "collectives": Call}


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


def across_ranks(of_ranks: Iterable[list[T]]) -> list[tuple[T, ...]]:
    """The first of each rank, then the second of each, and so on, as far as all ranks have one."""
    return list(zip(*of_ranks, strict=False))


def steps_with_different_rates(records: list[Record]) -> list[int]:
    """The optimizer steps, from 0 on, at which not all ranks have the same learning rates."""
    different = []
    for step, of_ranks in enumerate(across_ranks(record.learning_rates for record in records)):
        texts = set(map(str, of_ranks))  # a nan is not equal to another one, but its text is
        if len(texts) > 1:
            different.append(step)
    return different
