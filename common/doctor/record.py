"""The record of a rank: its observations as plain values and tensors, a list for each kind.

The observers fill it, and the rank leaves it in a file. The doctor reads the records of all ranks, and compares them.
"""

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

# Two files in the folder of a rank: its record, and an empty one that is touched when the rank has made progress.
FILE = "record.pickle"
PROGRESS = "progress"
Tensors = dict[str, Tensor]
Reason = Literal["finished", "steps", "crash", "stopped"]


@dataclass
class Epoch:
    """A pass over a DataLoader, in training or in evaluation.

    Two ranks that train on 6 samples of one order, 2 0 5 4 1 3, in batches of 2:

        rank  samples  batches  last_batch  complete  forwards  samples_in_forwards
        0     2 5 1    2        1           True      2         3
        1     0 4 3    2        1           True      2         3
    """

    loader: int  # the `id` of the DataLoader
    size: int | None  # the length of the whole data set, of which a `Subset` has a part; None if it is iterable
    # True if torch's own batch sampler deals out the samples. Those of a library may be corrected later, so they do not
    # count in `epochs.check_evaluation_samples`.
    dealt_out_by_torch: bool
    samples: list[int] | None = field(default_factory=list)  # the numbers read, in order; None where they have none
    batches: int = 0  # the number of batches that came
    complete: bool = False  # the data came to their end; `checks/end.py` asks whether they end on all ranks
    last_batch: int = 0  # the number of samples in the last one, which a sampler may have filled up or dropped
    forwards: int = 0  # the number of forwards in training with its batches
    samples_in_forwards: int = 0  # the number of samples in these, for `samples.check_training_samples`
    contents: list[tuple[int, ...]] = field(default_factory=list)  # a fingerprint of each tensor of the first samples


@dataclass
class Network:
    """A network that the script has called."""

    kind: str  # the name of its class
    parameter_count: int = 0  # the number of parameter tensors
    is_sharded: bool = False  # a rank holds parts of its parameters, as under FSDP
    has_module: bool = False  # a part of it is itself called `module`
    wrapped: bool = False  # DistributedDataParallel holds it, or it holds one
    forwards: int = 0  # calls in training mode with gradients
    past_wrapper: int = 0  # forwards that did not come through the wrapper
    changed: list[str] = field(default_factory=list)  # parameters that were exchanged, moved or converted once wrapped
    # A part of each parameter, by the number of steps after which it was noted.
    weights: dict[int, Tensors] = field(default_factory=dict)
    # BatchNorm's statistics in evaluations, by the number of steps before them.
    statistics: dict[int, Tensors] = field(default_factory=dict)


@dataclass
class Draw:
    """A forward or a batch that drew random numbers, and a fingerprint of the generator's state before."""

    source: str  # "forwards in training" or "batches"
    generator: str  # "torch", "NumPy", "Python" or "GPU"
    state: int


@dataclass
class Step:
    """A step of an optimizer."""

    # One for each parameter group; None where an optimizer works it out itself, as Adafactor does, and for a nan.
    learning_rates: list[float | None]
    micro_batches: int  # forwards in training, of all networks, since the step before


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
class End:
    """The end of the script on a rank.

    finished  it came to its last line
    steps     it made as many optimizer steps as --steps asked for
    crash     an error or a signal ended it
    stopped   the doctor ended it, because no rank made progress
    """

    reason: Reason | None = None  # None while it runs
    # After a crash one line: "train.py:9: ValueError: no disk", or "SIGKILL: last printed: step 9" if it was killed.
    text: str = ""


@dataclass
class Record:
    """The observations of a rank."""

    rank: int
    backend: str | None = None  # the process group's, if there was one
    last_printed: str = ""  # the last line of its output
    waits_in: str = ""  # the line at which the script stands still, such as "train.py:9"; empty while it makes progress
    end: End = field(default_factory=End)
    epochs: list[Epoch] = field(default_factory=list)
    networks: list[Network] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    # Noted after each of the first steps: the number of parameters without a gradient that are in an optimizer and in
    # no network, and the names of those with a gradient that are in a trained network and in no optimizer.
    stepped_without_gradient: int = 0
    trained_without_optimizer: list[str] = field(default_factory=list)
    # For each call that clipped gradients: True if a loss scale had multiplied them, and nobody had divided them.
    clippings: list[bool] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    collectives: list[Call] = field(default_factory=list)  # calls in the group of all ranks
    observer_errors: list[str] = field(default_factory=list)


KINDS = {
    "epochs": Epoch,
    "networks": Network,
    "draws": Draw,
    "steps": Step,
    "saves": Save,
    "collectives": Call,
}


def write(record: Record, path: Path) -> None:
    """Write a record as dicts: its classes are of a `common` that the script may have replaced by its own."""
    values = dict(vars(record), end=vars(record.end))
    for name in KINDS:
        values[name] = [vars(observation) for observation in values[name]]
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(values))
    os.replace(new, path)


def read(path: Path) -> Record:
    values = pickle.loads(path.read_bytes())
    values["end"] = End(**values["end"])
    for name, kind in KINDS.items():
        values[name] = [kind(**observation) for observation in values[name]]
    return Record(**values)
