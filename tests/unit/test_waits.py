"""No level waits for a GPU in a step: seen without one, on tensors that have a device and a shape but no values.

A copy from the CPU to the GPU, or back, waits unless it is asked not to; so does reading a value. Backward, the
optimizer and DDP do not run here: what is looked at is the batch's way to the GPU, the forward, and the counting.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from common import ladder
from common.accelerator import state
from common.accelerator.data_loader import DataLoaderShard
from common.args import CheckpointInterval, parse_args
from common.data import load_data
from common.data.digits import DigitImages
from common.model import build_model
from common.run import Run
from common.run.checkpointing import STEPS_BETWEEN_EXCHANGES, Checkpointing
from common.run.metrics import DeferredRead, LossWatch, Meter, demand_finite_weights
from tests.unit.accelerator.conftest import fresh_states  # noqa: F401 - the core finds its device anew

pytestmark = pytest.mark.slow
GPU = torch.device("cuda", 0)
STEPS = 12  # more than there are between two looks at the losses
FLAGS = ["--dataset", "synthetic", "--train-samples", "1280", "--eval-samples", "32"]
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
READ = torch.ops.aten._local_scalar_dense.default


class StepsAreOver(Exception):
    """Ends a training in which there is nothing more to look at."""


class Waits(TorchDispatchMode):
    """Notes each operation for which the CPU waits for the GPU.

    Args:
        value: what every read of a value from the GPU gives.

    Attributes:
        found: their names, in the order of the calls.
    """

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = value
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is READ and args[0].device.type == "cuda":
            self.found.append(str(function))
            return self.value
        result = function(*args, **kwargs)
        if function in COPIES and not self._is_asynchronous(function, args, kwargs):
            source = args[0] if function is COPIES[0] else args[1]
            if source.device.type != result.device.type:
                self.found.append(f"{function} from {source.device.type} to {result.device.type}")
        return result

    def _is_asynchronous(self, function, args, kwargs) -> bool:
        return bool(kwargs.get("non_blocking") or (function is COPIES[1] and len(args) > 2 and args[2]))


def batches_on_the_cpu(rung: str) -> Iterator[Any]:
    """What the loaders of level `rung` read: no values, and the end of the training."""
    for _ in range(STEPS):
        images = torch.empty(64, 1, 28, 28)
        labels = torch.empty(64, dtype=torch.int64)
        yield {"images": images, "labels": labels} if rung == "04_trainer" else (images, labels)
    raise StepsAreOver


def waits_of(rung: str) -> list[str]:
    """What the CPU waits for in the first steps of level `rung` on a GPU."""
    module = ladder.load(rung)
    args = parse_args(module.__file__, FLAGS)
    data = load_data(args)
    args.device = GPU
    waits = Waits()

    def build_on_the_gpu(args):
        with GPU:
            return build_model(args)

    def read(*_):
        waits.found.clear()  # what came before is done once
        return batches_on_the_cpu(rung)

    def batches(run, loader):
        return iter(loader) if isinstance(loader, DataLoaderShard) else read()

    with contextlib.ExitStack() as stack:

        def replace(owner, name, new):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, new))

        replace(module, "load_data", lambda _: data)
        replace(module, "build_model", build_on_the_gpu)
        for wrapper in ("EmulatedDataParallel", "DistributedDataParallel"):  # they need threads, or a group
            replace(module, wrapper, lambda model, *_: model)
        for name in ("dist", "check_same_dataset", "replica_devices", "seed_replicas", "DistributedSampler"):
            replace(module, name, mock.MagicMock())
        replace(Run, "batches", batches)
        replace(Run, "epochs", lambda run: iter([0]))
        replace(Run, "begin", mock.Mock())
        replace(DataLoaderShard, "_batches", read)
        replace(DeferredRead, "tolist", lambda read: [0.0] * LossWatch.LOSSES_PER_COPY)
        for name in ("start", "step", "stop"):
            replace(Meter, name, mock.Mock())
        replace(torch.Tensor, "backward", mock.Mock())
        replace(torch.cuda, "device_count", lambda: 1)
        replace(nn.Module, "to", lambda module, *_: module)
        for name in ("set_device", "current_stream"):
            replace(torch.cuda, name, mock.Mock())
        replace(state, "_single_device", lambda cpu: GPU)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(waits)
        with pytest.raises(StepsAreOver):
            module.train(args)
    return waits.found


def test_batches_of_images_that_stay_on_the_gpu_wait_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with FakeTensorMode(), Waits() as waits:
        digits = DigitImages("none", torch.empty(9, 28, 28, dtype=torch.uint8), torch.empty(9, dtype=torch.uint8))
        digits.move_to(GPU)
        assert len(waits.found) == 2  # once, before the training
        waits.found.clear()
        images, labels = digits.__getitems__([3, 1, 8])
        assert images.shape == (3, 1, 28, 28) and images.device == labels.device == GPU
    assert waits.found == []


def test_all_weights_are_asked_about_at_once():
    with FakeTensorMode(), Waits(value=1.0) as waits:  # the answer to "is it finite?"
        with GPU:
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        demand_finite_weights(model, step=1)
    assert waits.found == [str(READ)]


def test_ranks_tell_each_other_of_signals_without_waiting(tmp_path, monkeypatch):
    for name in ("dist", "DeferredRead"):
        monkeypatch.setattr(f"common.run.checkpointing.{name}", mock.MagicMock())
    monkeypatch.setattr("common.run.checkpointing.is_distributed", lambda: True)
    with FakeTensorMode(), Waits() as waits:
        checkpointing = Checkpointing(tmp_path, CheckpointInterval(), GPU)
        checkpointing.ask_all_ranks(STEPS_BETWEEN_EXCHANGES)
    assert waits.found == []


@pytest.mark.parametrize("rung", ladder.rungs())
def test_a_step_waits_for_nothing(rung):
    assert waits_of(rung) == []


@pytest.mark.parametrize("rung", ladder.rungs())
def test_copies_that_wait_are_found_twice_a_step(rung, monkeypatch):
    """As the levels once did: the images and the targets, each with a copy for which the CPU waits."""
    to = torch.Tensor.to

    def waiting(tensor, *args, non_blocking=False, **kwargs):
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", waiting)
    assert waits_of(rung) == ["aten._to_copy.default from cpu to cuda"] * 2 * STEPS


@pytest.mark.parametrize("rung", ladder.rungs())
def test_a_loss_that_is_read_is_found(rung, monkeypatch):
    def read(watch, loss, step):
        loss.item()

    monkeypatch.setattr(LossWatch, "note", read)
    assert waits_of(rung)
