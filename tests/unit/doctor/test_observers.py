"""The observers of the doctor, each alone."""

import gc
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from common.doctor.answers import Finding, NotExamined, Right
from common.doctor.checks import optimizers, steps
from common.doctor.observers import files
from common.doctor.observers.clipping import ClippingObserver
from common.doctor.observers.contents import contents
from common.doctor.observers.loaders import LoaderObserver
from common.doctor.observers.networks import NetworkObserver
from common.doctor.observers.optimizers import OptimizerObserver
from common.doctor.record import FILE, Record, read, write


def test_a_text_is_the_same_however_far_it_is_filled_up():
    alone = contents(torch.tensor([[5, 6, 7, 8]]))
    padded = contents({"words": torch.tensor([[5, 6, 7, 8, 0, 0], [3, 1, 4, 5, 9, 2]])})
    assert alone[0] == padded[0]
    assert alone[0] != padded[1]


def test_an_empty_batch_has_no_samples():
    assert contents({"x": torch.zeros(0, 3), "y": torch.zeros(0)}) == []


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    watched = []
    recorder = SimpleNamespace(record=Record(rank=0), wrap=lambda *_, before: watched.append(before))
    files.install(recorder)
    [before_save] = watched
    for folder in ("a", "b"):
        before_save({}, tmp_path / folder / "last.pt")
    assert [save.path for save in recorder.record.saves] == [str(tmp_path / name / "last.pt") for name in "ab"]


@pytest.mark.parametrize("rate", [None, float("nan")])
def test_an_optimizer_of_unknown_rate_or_with_an_inner_one_is_followed_to_the_last_step(rate, monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    recorder = SimpleNamespace(record=Record(rank=0), finish=ended.append)
    observer = OptimizerObserver(recorder, SimpleNamespace(networks={}), last_step=2)
    inner, outer = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
    inner.param_groups[0]["lr"] = rate
    outer.optim = inner  # as a ZeroRedundancyOptimizer has one
    for _ in range(2):
        observer.after_step(inner, (), {})
        observer.after_step(outer, (), {})
    assert ended == ["steps", 0]
    assert len(recorder.record.steps) == 2
    write(recorder.record, tmp_path / FILE)
    assert optimizers.check_learning_rates([read(tmp_path / FILE), read(tmp_path / FILE)]) == Right()
    assert isinstance(steps.check_schedule([read(tmp_path / FILE)]), NotExamined)
    for _ in range(2):  # an optimizer that is collected after a step
        observer.after_step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), (), {})
        gc.collect()
    assert len({step.optimizer for step in recorder.record.steps}) == 3


@pytest.mark.parametrize(
    "calls, enabled, kind",
    [
        pytest.param("scale unscale_", True, Right, id="divided before"),
        pytest.param("scale", True, Finding, id="not divided"),
        pytest.param("scale step", True, Right, id="of the step before"),
        pytest.param("scale", False, Right, id="never multiplied"),
        pytest.param("scale scale_of_other unscale_", True, Right, id="the loss of another scaler is scaled too"),
        pytest.param("scale unscale_ scale_of_other", True, Right, id="and it is scaled last"),
    ],
)
def test_gradients_are_clipped_at_their_own_scale(calls, enabled, kind):
    recorder = SimpleNamespace(record=Record(rank=0))
    observer = ClippingObserver(recorder)
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    for scaler in scalers:
        observer.after_init(None, scaler, "cpu", enabled=enabled)
    for call in calls.split():
        if call.startswith("scale"):
            observer.after_scale(None, scalers[call == "scale_of_other"], torch.ones(1))
        elif call == "step":
            observer.before_step(scalers[0])
        else:
            observer.before_division(scalers[0])
    observer.before_clipping()
    assert isinstance(steps.check_clipping([recorder.record]), kind)


@pytest.mark.parametrize("batch_size, is_only_one", [(2, False), (6, True)])
def test_a_forward_is_with_the_newest_batch_until_its_loader_has_been_read(batch_size, is_only_one):
    observer = LoaderObserver(SimpleNamespace(record=Record(rank=0)))
    loader = DataLoader(Subset(range(10), range(4, 10)), batch_size)
    iterator = iter(loader)
    observer.after_start(None, iterator, loader)
    for indices in loader.batch_sampler:
        observer.after_indices(indices, iterator)
        observer.before_batch(iterator)
        observer.after_batch(torch.zeros(len(indices)), iterator)
    assert observer.batch_in_use().samples[-1] == 9
    del iterator  # `break`, or the end
    assert (observer.batch_in_use() is not None) == is_only_one
    observer._record.epochs[0].batches[-1].evaluated = True
    assert observer.batch_in_use() is None


def test_what_backward_computes_again_is_no_further_forward():
    recorder = SimpleNamespace(record=Record(rank=0))
    observer = NetworkObserver(recorder, SimpleNamespace(batch_in_use=lambda: None))
    before = register_module_forward_pre_hook(observer.before_forward)
    after = register_module_forward_hook(observer.after_forward, with_kwargs=True)
    checkpoint(nn.Linear(2, 1), torch.ones(3, 2), use_reentrant=False).sum().backward()
    before.remove()
    after.remove()
    assert [(network.kind, network.forwards) for network in recorder.record.networks] == [("Linear", 1)]
