"""The record of a rank: what its observers have noted, as plain values and tensors.

The rank leaves it in a file. The doctor reads the records of all ranks, and its checks compare them.
"""

import os
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

# Two files in the folder of a rank: its record, and an empty one that is touched when the rank has made progress.
FILE = "record.pickle"
PROGRESS = "progress"
Tensors = dict[str, Tensor]
Content = tuple[int, ...]  # a fingerprint of each tensor of a sample
# One for each parameter group; None where an optimizer works it out itself, as Adafactor does.
Rates = list[float | None]
Reason = Literal["finished", "steps", "crash", "lost", "stopped"]


@dataclass
class Batch:
    """A batch of a DataLoader. A forward counts for the batch that was read last:

    for batch in loader: net(batch)                 its own
    for after in loader: net(batch); batch = after  that of `after`, in the look-ahead of accelerate; the first has none
    net(batch) behind the loop                      none
    """

    indices: list[int]  # those of its samples in the dataset; empty if they have none, as in a stream
    contents: list[Content]  # those of its samples; empty after the first thousands of an epoch
    steps: int = 0  # the number of optimizer steps before it
    forwards: list[int] = field(default_factory=list)  # the number of samples in each of its forwards in training
    evaluated: bool = False  # True if a network was called with it in evaluation mode, or without gradients


@dataclass
class Epoch:
    """A pass over a DataLoader, in training or in evaluation."""

    dataset: int  # the `id` of the DataLoader's dataset: a script may make a loader for each epoch
    dataset_length: int | None  # that of the whole dataset, of which a `Subset` has a part; None if it has none
    available: Sequence[int] = ()  # the indices that the loader can read: all, or the part of a `Subset`
    complete: bool = False  # True if the loader came to the end of its data
    gathers: bool = False  # True if a collective gathered from all ranks before the next epoch began
    batches: list[Batch] = field(default_factory=list)


@dataclass
class Network:
    """What the script calls, itself or through a wrapper. The modules that a network calls are a part of it."""

    shapes: dict[str, tuple] = field(default_factory=dict)  # those of its parameters, but for what a rank has in part
    trained_numbers: int = 0  # the size of its parameters that require gradients
    forwards: int = 0  # the number of calls in training mode with gradients
    wrapped: bool = False  # True if DistributedDataParallel holds it, or it holds one
    past_wrapper: int = 0  # the number of forwards that did not come through the wrapper
    changed: list[str] = field(default_factory=list)  # parameters that were exchanged, moved or converted once wrapped
    # Some numbers of each tensor, by the number of optimizer steps before.
    weights: dict[int, Tensors] = field(default_factory=dict)
    statistics: dict[int, Tensors] = field(default_factory=dict)  # those of BatchNorm, in evaluations


@dataclass
class Step:
    learning_rates: Rates
    micro_batches: int  # the number of forwards in training, of all networks, since the step before
    optimizer: int = 0  # the number of the optimizer, which no other one has


@dataclass
class Save:
    path: str
    state_dicts: list[list[str]]  # the keys of each one that `torch.save` has put into the file


@dataclass(frozen=True)
class Call:
    name: str  # a collective
    line: str  # that of the script which calls it


@dataclass
class End:
    """The end of the script on a rank: what the rank has noted itself, until `end_of` decides.

    finished  it came to its last line
    steps     it made as many optimizer steps as --steps asked for
    crash     an error of its own, or a signal, ended it
    lost      an error of communication ended it: another rank has left, or has called another collective
    stopped   the doctor ended it, because no rank made progress
    """

    reason: Reason | None = None  # None while it runs, and if it has left by `os._exit(0)`
    # One line: "train.py:9: ValueError: no disk", "SIGKILL: last printed: step 9", "no rank made progress for 120 s".
    text: str = ""


@dataclass
class Record:
    """The notes of one rank, in the order of the files of `checks` that they are about."""

    rank: int
    backend: str | None = None  # the process group's, if there was one
    observer_errors: dict[str, str] = field(default_factory=dict)  # the first text, by place and type

    end: End = field(default_factory=End)
    last_printed: str = ""  # the last line of its output
    waits_in: str = ""  # the line, as "train.py:9", in which the script waits or has failed; empty after progress
    handles: str = ""  # the error that the script handles there, as in a `finally`

    collectives: dict[Call, None] = field(default_factory=dict)  # those of all ranks, in the order of the first calls
    exchanged: Counter[int] = field(default_factory=Counter)  # how many numbers, by the number of steps before
    has_joined: bool = False  # True if it was in a Join, in which ranks may have different numbers of batches

    steps: list[Step] = field(default_factory=list)
    optimized_in_no_network: int = 0  # parameters of optimizers without a gradient, after the first steps
    trained_in_no_optimizer: list[str] = field(default_factory=list)  # parameters of trained networks, with a gradient

    # For each call that clipped gradients: True if a loss scale had multiplied them, and nobody had divided them.
    clippings: list[bool] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    networks: list[Network] = field(default_factory=list)
    is_sharded: bool = False  # True if the rank holds shards of parameters, as under FSDP
    is_tensor_parallel: bool = False  # True if ranks may compute parts of the same samples
    # By what drew ("forwards in training" or "batches") and the generator: a fingerprint of its state before each draw.
    draws: dict[tuple[str, str], list[int]] = field(default_factory=dict)


class _Pickler(pickle.Pickler):
    """It writes the classes of this module by their names: pickle would import the script's `common` (`run_script`)."""

    def persistent_id(self, obj: Any) -> str | None:
        is_ours = isinstance(obj, type) and obj.__module__ == __name__
        return obj.__name__ if is_ours else None

    def reducer_override(self, obj: Any) -> Any:  # torch would make an archive of each tensor, while the script waits
        return (torch.tensor, (obj.numpy(),)) if type(obj) is Tensor else NotImplemented


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: str) -> type:
        return globals()[pid]


def write(record: Record, path: Path) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        _Pickler(file).dump(record)
    os.replace(new, path)


def read(path: Path) -> Record:
    with path.open("rb") as file:
        return _Unpickler(file).load()
