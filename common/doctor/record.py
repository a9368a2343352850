"""The observations of one rank as plain values and tensors, which the checks compare with those of the other ranks."""

import os
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from torch import Tensor

T = TypeVar("T")
RECORD = "record.pickle"  # in the folder of the rank
Tensors = dict[str, Tensor]
Draws = dict[str, list[int]]  # for each random generator fingerprints of its states before something drew from it


@dataclass
class Network:
    """A network that the script has called."""

    kind: str  # the name of its class
    parameter_count: int = 0  # tensors
    has_module: bool = False  # a part of it is itself called `module`
    # What DistributedDataParallel relies on of each parameter: its id, device and dtype, when it was given the network.
    when_wrapped: dict[str, tuple] = field(default_factory=dict)
    wrapped: bool = False  # DistributedDataParallel holds it, or it holds one
    forwards: int = 0  # calls in training mode with gradients
    past_wrapper: int = 0  # those of them that did not come through the wrapper
    changed: list[str] = field(default_factory=list)  # parameters that were exchanged, moved or converted once wrapped
    without_gradient: list[str] = field(default_factory=list)  # parameters, after the last step that was compared
    # After some numbers of steps a part of each parameter; after 0, as DDP first trains with it.
    weights: dict[int, Tensors] = field(default_factory=dict)
    # BatchNorm's statistics in evaluations, by the number of steps before them.
    statistics: dict[int, Tensors] = field(default_factory=dict)


@dataclass
class Epoch:
    """A pass over a DataLoader, in training or in evaluation.

    Two ranks that train on 6 samples of one order, 2 0 5 4 1 3, in batches of 2:

        rank  samples  batches  last_batch  complete  forwards  shares
        0     2 5 1    2        1           True      2         0
        1     0 4 3    2        1           True      2         0

    A script in which each rank reads the whole batch, and cuts its own half out of it, has shares == forwards.
    """

    loader: int  # the `id` of the DataLoader
    size: int | None  # of its data set, without the restriction by a `Subset`; None if it is iterable
    by_torch: bool  # torch's own batch sampler deals out the samples, not one of a library that corrects them later
    samples: list[int] | None = field(default_factory=list)  # the numbers read, in order; None where they have none
    batches: int = 0  # those that came
    complete: bool = False  # the data came to their end
    last_batch: int = 0  # the number of samples in the last one
    forwards: int = 0  # of a network in training, with its batches
    shares: int = 0  # forwards whose input was one rank's share of the batch, as the script has cut it out
    contents: list[tuple[int, ...]] = field(default_factory=list)  # a fingerprint of each tensor of the first samples


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
    """The observations of a rank, by the module that makes them."""

    rank: int
    backend: str | None = None  # of the process group, if there was one
    troubles: list[str] = field(default_factory=list)  # errors of the observers

    # launch and run_script
    ended: Literal["whole", "steps", "crash", "stopped"] | None = None  # "steps": as --steps asked; None: it runs
    crash: str | None = None  # the error in one line, or the exit code of a process that has not said one
    last_line: str = ""  # that was printed

    # heartbeat
    line: str = ""  # of the script, where it last stood still
    called: str = ""  # the function that was called from there

    # optimizers
    steps: int = 0
    learning_rates: list[list[float]] = field(default_factory=list)  # at each step, of each parameter group
    forwards_until_step: list[int] = field(default_factory=list)  # at each step, in training, of all networks
    in_no_optimizer: list[str] = field(default_factory=list)  # parameters of a network that have gradients
    in_no_network: int = 0  # parameters of an optimizer, without gradients

    # steps
    clippings: int = 0
    clippings_of_scaled: int = 0  # of gradients that were still multiplied by a loss scale

    # networks
    networks: list[Network] = field(default_factory=list)
    forward_draws: Draws = field(default_factory=dict)  # of forwards in training

    # data, files and end
    epochs: list[Epoch] = field(default_factory=list)
    batch_draws: Draws = field(default_factory=dict)  # of reading a batch in this process
    saves: list[Save] = field(default_factory=list)
    collectives: list[Call] = field(default_factory=list)  # of the group of all ranks


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


def across_ranks(by_rank: Iterable[list[T]]) -> list[tuple[T, ...]]:
    """The first of each rank, then the second of each, and so on, as far as all ranks have one."""
    return list(zip(*by_rank, strict=False))


def steps_with_different_rates(records: list[Record]) -> list[int]:
    """The optimizer steps, from 0 on, at which not all ranks have the same learning rates."""
    different = []
    for step, by_rank in enumerate(across_ranks(record.learning_rates for record in records)):
        texts = set(map(str, by_rank))  # a nan is not equal to another one, but its text is
        if len(texts) > 1:
            different.append(step)
    return different
