"""`prepare` returns what accelerate returns for each kind of object, and the Accelerator forgets it when asked."""

import re

import pytest
import torch
from torch.utils.data import DataLoader

from common.accelerator import Accelerator
from tests.unit.accelerator.several_processes import on_ranks


def new_parts():
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_prepare_returns_accelerates_kinds(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer = new_parts()
    other = object()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(scheduler, other, model, optimizer, DataLoader(range(2)))
    prepared_scheduler, same_other, same_model, prepared_optimizer, loader = prepared
    assert same_other is other and same_model is model and "forward" not in vars(model)
    assert isinstance(prepared_optimizer, torch.optim.Optimizer) and isinstance(loader, DataLoader)
    assert prepared_scheduler.optimizers == [prepared_optimizer]  # found although it stood first
    assert all(each._is_accelerate_prepared for each in prepared if each is not other)
    again = accelerator.prepare(*prepared)
    assert all(a is b for a, b in zip(prepared, again, strict=True))
    assert accelerator.prepare(model) is model
    marked = DataLoader(range(2))
    marked._is_accelerate_prepared = True  # as some scripts do
    assert accelerator.prepare(marked) is marked
    accelerator.save_state(tmp_path)
    with pytest.raises(ValueError, match="a list with 2 elements"):
        accelerator.prepare(model, optimizer, device_placement=[True])


class OldOptimizer(torch.optim.SGD):
    def zero_grad(self):
        super().zero_grad()


def test_an_optimizer_whose_zero_grad_takes_no_argument_can_be_prepared():
    model, _ = new_parts()
    optimizer = Accelerator(cpu=True).prepare(OldOptimizer(model.parameters(), lr=0.1))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.zero_grad()
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="not supported by this optimizer"):
        optimizer.zero_grad(set_to_none=False)


def prepare_a_frozen_model(accelerator):
    model = torch.nn.Linear(1, 1).requires_grad_(False)
    return accelerator.prepare(model) is model


def test_a_frozen_model_can_be_prepared_on_several_processes():
    assert on_ranks(2, prepare_a_frozen_model) == [True, True]


def test_free_memory_forgets_what_was_prepared(tmp_path):
    accelerator = Accelerator(cpu=True)
    assert accelerator.free_memory(*accelerator.prepare(*new_parts())) == [None, None]
    accelerator.save_state(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "random_states_0.pkl"]


def test_objects_that_cannot_be_registered_are_named_with_their_places(libraries):
    def places(library, *objects):
        accelerator = library.Accelerator(cpu=True)
        with pytest.raises(ValueError) as error:
            accelerator.register_for_checkpointing(*objects)
        return re.findall(r"Item at index (\d)", str(error.value))

    ours, theirs = libraries
    wrong = torch.ones(1)
    valid = torch.nn.Linear(1, 1)
    assert places(ours, wrong, wrong, valid) == places(theirs, wrong, wrong, valid) == ["0", "1"]
    assert places(ours, valid, wrong) == ["1"]
    assert places(theirs, valid, wrong) == ["0"]  # its place among the wrong ones
