"""Gradients are averaged over the micro-batches of a window and over the processes; weights change at its end."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from common.accelerator import Accelerator
from tests.states import forget_states
from tests.toys import Stream
from tests.unit.accelerator.several_processes import on_ranks

SAMPLES = 16
INPUTS = torch.arange(4.0 * SAMPLES, dtype=torch.float64).view(SAMPLES, 4).sin()
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


def new_parts(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Training(NamedTuple):
    """The weights before and after, and of each micro-batch whether it syncs and the gradient."""

    before: torch.Tensor
    after: torch.Tensor
    syncs: list[bool]
    gradients: list[torch.Tensor]


def train(accelerator):
    """A training with micro-batches of one sample."""
    model, *rest = new_parts(seed=accelerator.process_index)
    before = model.weight.detach().clone()
    model, optimizer, scheduler, loader = accelerator.prepare(model, *rest, DataLoader(DATA, batch_size=1))
    parameter = accelerator.unwrap_model(model).weight
    syncs, gradients = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            syncs.append(accelerator.sync_gradients)
            gradients.append(parameter.grad.clone())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return Training(before, parameter.detach(), syncs, gradients)


def test_gradients_stay_local_until_the_window_ends_and_agree_then():
    one, two = on_ranks(2, train, gradient_accumulation_steps=2)
    assert not torch.equal(one.before, two.before) and torch.equal(one.after, two.after)
    assert one.syncs == two.syncs == [False, True] * 4
    assert list(map(torch.equal, one.gradients, two.gradients)) == one.syncs


def test_a_script_may_say_that_a_batch_is_not_the_last(libraries):
    for library in libraries:
        accelerator = library.Accelerator(gradient_accumulation_steps=2, cpu=True)
        loader = accelerator.prepare(DataLoader(DATA, batch_size=8))
        flags = []
        for _ in loader:
            loader.end_of_dataloader = False
            for _ in range(3):
                with accelerator.accumulate():
                    flags.append(accelerator.sync_gradients)
        assert flags == [False, True] * 3, library


def run_a_cell_twice(library):
    """The weights, and how often the optimizer stepped: objects stay prepared, the Accelerator is made anew."""
    model, optimizer, _ = new_parts()
    loader = DataLoader(DATA, batch_size=2)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for accumulation in (3, 4):
        accelerator = library.Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.sync_gradients
        accelerator.end_training()
    forget_states()
    return {"weight": model.weight.tolist(), "optimizer steps": len(steps)}


def test_a_cell_that_runs_twice_goes_on_with_what_it_has_prepared(libraries):
    """The windows of the new Accelerator reach the loader and the optimizer that an earlier one has prepared."""
    ours, theirs = libraries
    training = run_a_cell_twice(ours)
    assert training["optimizer steps"] == 3 + 2  # the last window of the first run has two micro-batches
    assert run_a_cell_twice(theirs) == training


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scheduler: pickle.loads(pickle.dumps(scheduler))])
def test_copies_of_an_optimizer_follow_the_windows_of_the_run(copied):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, *rest = new_parts()
    _, scheduler = accelerator.prepare(*rest)
    copied_scheduler = copied(scheduler)
    (copied_optimizer,) = copied_scheduler.optimizers
    rates = []
    for _ in range(2):
        with accelerator.accumulate():
            copied_optimizer.step()
            copied_scheduler.step()
            rates += copied_scheduler.get_last_lr()
    assert rates == [0.1, pytest.approx(0.09)] and scheduler.get_last_lr() == [0.1]


def test_a_single_tensor_can_be_clipped_as_torch_allows():
    accelerator = Accelerator(cpu=True)
    model, *_ = new_parts()
    accelerator.backward(1000 * model(INPUTS).sum())
    accelerator.clip_grad_norm_(model.weight, 1.0)
    assert model.weight.grad.norm() == pytest.approx(1.0)


def train_on_uneven_inputs(accelerator):
    """The number of batches that this process had, of five, the weight, and the loader's length afterwards."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(5, 1), batch_size=1))
    with accelerator.join_uneven_inputs([optimizer], even_batches=True):
        batches = 0
    with accelerator.join_uneven_inputs([optimizer, model, torch.nn.Dropout()], even_batches=False):
        for x in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    return {"batches": batches, "weight": model.module.weight.item(), "later batches": len(loader)}


def test_uneven_inputs_can_be_joined_on_gloo():
    # https://github.com/huggingface/accelerate/pull/820: there it has no effect but on several GPUs.
    one, two = on_ranks(2, train_on_uneven_inputs)
    last_step_counts_half = pytest.approx(-0.25)
    assert one == {"batches": 3, "weight": last_step_counts_half, "later batches": 3}
    assert two == {"batches": 2, "weight": last_step_counts_half, "later batches": 3}


def join_a_stream(accelerator):
    accelerator.prepare(DataLoader(Stream(range(4))))
    uneven = accelerator.join_uneven_inputs([], even_batches=False)
    with pytest.warns(UserWarning, match="only supported for map-style datasets") as warned, uneven:
        pass
    return warned[0].filename


def test_even_batches_of_a_stream_are_warned_of_where_the_script_asks():
    assert on_ranks(2, join_a_stream) == [__file__] * 2
