"""What is noted of networks: forwards, weights and random numbers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from common.doctor.checks.loaders import LoaderObserver
from common.doctor.checks.networks import NetworkObserver
from common.doctor.checks.random_numbers import check_draws, note_draws
from common.doctor.checks.weights import some_numbers, some_weights
from common.doctor.record import Network, Record, Step
from common.doctor.results import Finding, Passed, Skipped


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


def test_what_a_sampler_draws_is_no_augmentation(recorder, monkeypatch):
    monkeypatch.setattr("numpy.random.get_state", lambda legacy: {"state": {"inc": 1}})  # as of `set_bit_generator`
    LoaderObserver(recorder).install()
    recorder.record.steps.append(Step([0.1], 1))
    for augment, noted in ((False, 0), (True, 2)):
        data = [torch.ones(1)] * 9
        sampler = (torch.randint(9, (4,)).tolist() for _ in range(3))
        list(DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows, noisy=augment: noisy and torch.rand(2)))
        assert sum(map(len, recorder.record.draws.values())) == noted


def test_the_first_draws_of_each_source_are_recorded():
    record = Record(0, steps=[Step([0.1], 1)])
    for source in ["batches"] * 100 + ["forwards in training"]:
        note_draws(record, source, {"torch": 1}, torch.device("cpu"))
    assert [len(states) for states in record.draws.values()] == [64, 1]


@pytest.mark.parametrize("of_ranks, kind", [((1, 2, 2), Finding), ((1, 1, 2), Finding), ((1, 2, 3), Passed)])
def test_no_two_ranks_draw_alike(of_ranks, kind):
    networks = [Network(forwards=1)]
    records = [Record(0, draws={("batches", "torch"): [state]}, networks=networks) for state in of_ranks]
    assert isinstance(check_draws(records), kind)
    records[0].networks = [Network(forwards=1, shapes={"of another stage": (1,)})]
    assert isinstance(check_draws(records), Skipped)
