"""The observers of the doctor, each alone."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset

from common.doctor.checks import clipping, files, optimizers, samples
from common.doctor.checks.contents import contents_of, count_samples
from common.doctor.checks.loaders import LoaderObserver
from common.doctor.checks.networks import NetworkObserver
from common.doctor.checks.weights import some_numbers, some_weights
from common.doctor.record import Record, Step
from common.doctor.recorder import Recorder
from common.doctor.results import Finding, Passed, Skipped


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """A recorder whose wrappers are taken off after the test: `Recorder.wrap` calls the `setattr` of monkeypatch."""
    monkeypatch.setattr("common.doctor.recorder.setattr", monkeypatch.setattr, raising=False)
    recorder = Recorder(tmp_path, 0, tmp_path / "train.py")
    yield recorder
    assert recorder.record.observer_errors == {}


def test_samples_that_are_not_stacked_have_contents_too():
    samples = [(torch.ones(3, 8), torch.ones(4)), (torch.ones(3, 9), torch.ones(5))]  # images and boxes
    assert len(set(contents_of(tuple(zip(*samples, strict=True)), 2))) == 2
    assert contents_of([image for image, _ in samples], 2) == contents_of(torch.eye(2).to_sparse(), 2) == []
    assert count_samples(([torch.ones(3, 8, 8)] * 2,), {}) == count_samples((), {"x": torch.ones(2, 3)}) == 2
    assert len(contents_of(torch.ones(2, 3, dtype=torch.complex64).conj(), 2)) == 2
    assert (
        len(contents_of(type("Named", (tuple,), {"items": None})([torch.ones(2, 3)]), 2)) == 2
    )  # with a field `items`


def test_files_of_one_name_in_two_folders_are_two(recorder, tmp_path):
    files.FileObserver(recorder).install()
    paths = [tmp_path / folder / "last.pt" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        torch.save({"model": {"w": torch.ones(1), "_extra_state": b""}}, path)
    torch.save({}, os.devnull)
    assert [(save.path, save.state_dicts) for save in recorder.record.saves] == [(str(path), [["w"]]) for path in paths]


def test_what_a_sampler_draws_is_no_augmentation(recorder, monkeypatch):
    monkeypatch.setattr("numpy.random.get_state", lambda legacy: {"state": {"inc": 1}})  # as of `set_bit_generator`
    LoaderObserver(recorder).install()
    recorder.record.steps.append(Step([0.1], 1))
    for augment, noted in ((False, 0), (True, 2)):
        data = [torch.ones(1)] * 9
        sampler = (torch.randint(9, (4,)).tolist() for _ in range(3))
        list(DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows, noisy=augment: noisy and torch.rand(2)))
        assert sum(map(len, recorder.record.draws.values())) == noted


def test_the_optimizer_in_a_zero_redundancy_optimizer_is_followed_to_the_last_step(recorder, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    observer = optimizers.OptimizerObserver(recorder, {}, last_step=3)
    inner, outer = (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1) for _ in range(2))
    inner.param_groups[0]["lr"] = None  # as Adafactor has it
    outer.optim = inner
    for optimizer in [inner, outer] * 3:
        observer.after_step(optimizer, (), {})
    assert (len(recorder.record.steps), recorder.record.end.reason, ended) == (3, "steps", [0])


@pytest.mark.parametrize(
    "calls, enabled, kind",
    [
        pytest.param("scale unscale_ clip step", True, Passed, id="divided before"),
        pytest.param("scale clip step", True, Finding, id="not divided"),
        pytest.param("scale step update scale clip", True, Finding, id="not divided after a step"),
        pytest.param("scale_sharded clip", True, Finding, id="not divided by the scaler of FSDP"),
        pytest.param("scale clip step", False, Passed, id="never multiplied"),
        pytest.param("scale unscale_ scale_of_other clip", True, Passed, id="another scaler multiplies last"),
    ],
)
def test_gradients_are_clipped_at_their_own_scale(calls, enabled, kind, recorder):
    clipping.ClippingObserver(recorder).install()
    scaler, other = (torch.amp.GradScaler("cpu", 65536.0, 2.0, 0.5, 2000, enabled) for _ in range(2))
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    do = {
        "scale": lambda: scaler.scale(weight.sum()).backward(),
        "scale_sharded": lambda: ShardedGradScaler("cpu").scale(weight.sum()).backward(),
        "scale_of_other": lambda: other.scale(torch.ones(1)),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "clip": lambda: nn.utils.clip_grad_norm_([weight], 1.0),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
    }
    for call in calls.split():
        do[call]()
    assert isinstance(clipping.check_clipping([recorder.record]), kind)


@pytest.mark.parametrize(
    "dataset, order, kind",
    [
        (range(40), range(39, -1, -1), Finding),
        (Subset(range(40), range(39, -1, -1)), range(30), Skipped),  # as random_split has made it
        (range(41), [*range(1, 41, 2), 0], Skipped),  # filled up
    ],
)
def test_epochs_are_alike_by_mistake_if_they_are_shuffled(dataset, order, kind, recorder):
    LoaderObserver(recorder).install()
    loader = DataLoader(dataset, batch_sampler=torch.tensor(order).split(4))
    for _ in range(2):
        list(loader)
    for epoch in recorder.record.epochs:
        epoch.batches[0].forwards.append(4)
        epoch.batches[-1].steps = 1
    assert isinstance(samples.check_orders([recorder.record]), kind)


def test_loaders_of_one_data_set_read_the_same_and_those_of_others_do_not(recorder):
    LoaderObserver(recorder).install()
    for number in range(12):
        data = range(4 + number)  # a new one, which nothing else holds
        list(DataLoader(data))
        list(DataLoader(data))
    assert len({epoch.dataset for epoch in recorder.record.epochs}) == 12
    list(DataLoader(range(4), num_workers=1, in_order=False))
    assert [batch.indices for batch in recorder.record.epochs[-1].batches] == [[]] * 4


def test_a_forward_is_with_the_newest_batch_while_its_loader_is_read(recorder):
    observer = LoaderObserver(recorder)
    observer.install()
    iterator = iter(DataLoader(Subset(range(9), [4, 99, 8])))
    next(iterator)
    with pytest.raises(IndexError):  # the script reads on
        next(iterator)
    next(iterator)
    assert observer.batch_in_use().indices == [8]
    del iterator  # `break`, or the end
    assert observer.batch_in_use() is None
    list(ThreadPoolExecutor().submit(iter, DataLoader(range(2))).result())  # of another thread: unseen, and no error


def test_what_backward_computes_again_is_no_further_forward(monkeypatch):
    recorder = SimpleNamespace(record=Record(rank=0))
    observer = NetworkObserver(recorder, SimpleNamespace(batch_in_use=lambda: None))
    before = register_module_forward_pre_hook(observer.before_forward)
    after = register_module_forward_hook(observer.after_forward, with_kwargs=True)
    module = nn.Linear(2, 1)
    checkpoint(module, torch.ones(3, 2), use_reentrant=False).sum().backward()
    assert [(network.shapes["weight"], network.forwards) for network in recorder.record.networks] == [((1, 2), 1)]
    recorder.record.exchanged.update({99: 2, 100: 3})  # the numbers of one weight, and of all
    for _ in range(100):  # the weights are noted after each of the first 64, and where they may be averaged
        recorder.record.steps.append(Step([0.1], 1))
        module(torch.ones(3, 2))
    recorder.record.steps *= 2
    module.eval()(torch.ones(3, 2))  # as rank 0 alone may do with averaged weights
    before.remove()
    after.remove()
    assert list(recorder.record.networks[0].weights) == [*range(1, 65), 100]
    assert some_weights(nn.ModuleDict({"_fsdp_wrapped_module": module})) == some_weights(nn.LazyLinear(1)) == {}
    with pytest.raises(RuntimeError):  # here, and not where the record is written
        torch.func.vmap(some_numbers)(torch.ones(2, 3))
    assert len(some_numbers(torch.arange(512).repeat(512)).unique()) > 30  # of all columns
    monkeypatch.setattr("common.doctor.checks.networks.states", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        observer.before_forward(module.train(), ())
    assert observer._forward is not None  # else the parts of a network would count as networks
