"""What a training script sees in one process: windows, schedulers, gathering, unwrapping, settings."""

import copy
import importlib
import pickle
import re

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.accelerator import Accelerator
from common.accelerator.data_loader import get_sampler
from common.accelerator.state import PartialState
from common.accelerator.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    TorchDynamoPlugin,
)
from tests.states import OURS, THEIRS, forget_states


def data(n):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)


def train(accelerator, loader, model, optimizer, clip=None, own_backward=False):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward() if own_backward else accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def parts(seed=0, lr=0.1, dtype=torch.float64):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1, dtype=dtype)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def test_a_single_tensor_can_be_clipped_as_torch_allows():
    accelerator = Accelerator(cpu=True)
    model, _ = parts()
    accelerator.backward(1000 * model(torch.ones(1, 4, dtype=torch.float64)).sum())
    accelerator.clip_grad_norm_(model.weight, 1.0)
    assert model.weight.grad.norm() == pytest.approx(1.0)


# Preparing


def test_prepare_returns_the_kinds_that_accelerate_returns_and_leaves_the_rest():
    accelerator = Accelerator(cpu=True)
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = object()
    prepared = accelerator.prepare(scheduler, other, model, optimizer, DataLoader(range(2)))
    assert prepared[1] is other and prepared[2] is model and "forward" not in vars(model)
    assert all(each._is_accelerate_prepared for each in prepared if each is not other)
    assert isinstance(prepared[3], torch.optim.Optimizer) and isinstance(prepared[4], DataLoader)
    assert prepared[0].optimizers == [prepared[3]]  # found although it stood first
    again = accelerator.prepare(*prepared)
    assert all(a is b for a, b in zip(prepared, again, strict=True))
    assert [len(kept) for kept in (accelerator._models, accelerator._optimizers, accelerator._schedulers)] == [1, 1, 1]
    assert accelerator.prepare(model) is model
    with pytest.raises(ValueError, match="a list with 2 elements"):
        accelerator.prepare(model, optimizer, device_placement=[True])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scheduler: pickle.loads(pickle.dumps(scheduler))])
def test_copies_of_an_optimizer_follow_the_windows_of_the_run(copied):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    _, optimizer = parts()
    scheduler = accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))[1]
    copied_scheduler = copied(scheduler)
    (copied_optimizer,) = copied_scheduler.optimizers
    followed = []
    for _ in range(2):
        with accelerator.accumulate():
            followed.append(copied_optimizer.gradient_state.sync_gradients)
            copied_optimizer.step()
            copied_scheduler.step()
    assert followed == [False, True]
    assert copied_scheduler.get_last_lr() == [pytest.approx(0.01)] and scheduler.get_last_lr() == [0.1]


class OldOptimizer(torch.optim.SGD):
    def zero_grad(self):
        super().zero_grad()


def test_an_optimizer_whose_zero_grad_takes_no_argument_can_be_prepared():
    model, _ = parts()
    optimizer = Accelerator(cpu=True).prepare(OldOptimizer(model.parameters(), lr=0.1))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.zero_grad()
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="not supported by this optimizer"):
        optimizer.zero_grad(set_to_none=False)


class Rows:
    """What is asked of a datasets.Dataset."""

    with_format = None

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, numbers):
        return Rows([self.rows[number] for number in numbers])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 6, 7])
def test_inputs_are_split_in_order_and_padded_with_the_last(n, padded):
    state = PartialState(cpu=True)
    state.num_processes, shares = 3, []
    for state.process_index in range(3):
        numbers = list(range(n))
        inputs = {"list": numbers, "tensor": torch.arange(n), "rows": torch.arange(n)[:, None] + torch.zeros(2)}
        with state.split_between_processes(inputs, padded) as share:
            assert share["tensor"].tolist() == share["rows"][:, 1].tolist() == share["list"]
        with state.split_between_processes("abcdefg"[:n], padded) as text:
            assert text == "abcdefg"[:n]
        with state.split_between_processes(tuple(numbers), padded) as several:
            assert several == tuple(share["list"])
        with state.split_between_processes(Rows(numbers), padded) as dataset:
            assert dataset.rows == share["list"]
        shares.append(share["list"])
    least, extra = divmod(n, 3)
    sizes = [least + (rank < extra or (padded and extra > 0)) for rank in range(3)]
    assert [len(share) for share in shares] == sizes
    real = [share[: least + (rank < extra)] for rank, share in enumerate(shares)]
    assert [number for share in real for number in share] == list(range(n))
    assert all(set(share[least + (rank < extra) :]) <= {n - 1} for rank, share in enumerate(shares))


def test_free_memory_forgets_what_was_prepared():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None and optimizer is None and not accelerator._models and not accelerator._optimizers


# Settings


def test_what_is_out_of_scope_is_refused_and_an_empty_setting_passes(monkeypatch):
    for option in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"):
        Accelerator(cpu=True, **{option: {}})
        with pytest.raises(NotImplementedError, match="out of scope"):
            Accelerator(cpu=True, **{option: object()})
    with pytest.raises(TypeError, match="unexpected"):
        Accelerator(cpu=True, unexpected=1)
    with pytest.raises(NotImplementedError, match="fp8"):
        Accelerator(mixed_precision="fp8", cpu=True)
    with pytest.raises(NotImplementedError, match="KwargsHandler"):
        Accelerator(kwargs_handlers=[KwargsHandler()], cpu=True)
    with pytest.raises(AssertionError, match="Unsupported kwargs handler"):
        Accelerator(kwargs_handlers=[object()], cpu=True)
    with pytest.raises(NotImplementedError, match="use_regional_compilation"):
        TorchDynamoPlugin(use_regional_compilation=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(NotImplementedError, match="out of scope"):
        Accelerator(cpu=True)


def test_contradictory_settings_are_refused():
    with pytest.raises(ValueError, match="mixed_precision"):
        Accelerator(mixed_precision="int3", cpu=True)
    with pytest.raises(ValueError, match="gradient_accumulation"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(2), cpu=True)
    with pytest.raises(ValueError, match="at least one micro-batch, not 0"):
        Accelerator(gradient_accumulation_steps=0, cpu=True)
    with pytest.raises(ValueError, match="You can only pass one <class"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()], cpu=True)
    Accelerator(mixed_precision="bf16", cpu=True)
    with pytest.raises(ValueError, match="already runs with 'bf16'"):
        Accelerator(mixed_precision="no", cpu=True)


def test_settings_of_the_launcher_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16" and accelerator.gradient_accumulation_steps == 4


def test_handlers_give_only_what_differs_from_the_defaults():
    theirs = pytest.importorskip("accelerate.utils")
    for name, kwargs in {
        "GradScalerKwargs": {"growth_interval": 5},
        "AutocastKwargs": {"cache_enabled": False},
        "InitProcessGroupKwargs": {"backend": "gloo"},
        "DistributedDataParallelKwargs": {"find_unused_parameters": True, "comm_state_option": {"a": 1}},
        "ProfileKwargs": {"with_stack": True},
        "TorchDynamoPlugin": {"backend": "inductor", "mode": "max-autotune", "dynamic": True},
        "GradientAccumulationPlugin": {"num_steps": 3, "sync_each_batch": True},
    }.items():
        import common.accelerator.utils as ours

        assert getattr(ours, name)().to_kwargs() == getattr(theirs, name)().to_kwargs() == {}
        assert getattr(ours, name)(**kwargs).to_kwargs() == getattr(theirs, name)(**kwargs).to_kwargs()
    assert GradScalerKwargs().to_kwargs() == {} and InitProcessGroupKwargs().timeout.total_seconds() == 600


def test_split_batches_and_the_dataloader_configuration_reach_the_loaders():
    shared = DataLoaderConfiguration(even_batches=False, use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(dataloader_config=shared, split_batches=True, cpu=True)
    assert accelerator.split_batches and not accelerator.even_batches and not shared.split_batches
    loader = accelerator.prepare(DataLoader(range(4), shuffle=True))
    assert get_sampler(loader).initial_seed == 3


def test_an_accelerator_after_end_training_starts_afresh():
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3, cpu=True)
    first.end_training()
    assert first.is_main_process and first.mixed_precision == "bf16"
    second = Accelerator(mixed_precision="no", cpu=True)
    assert second.mixed_precision == "no" and second.gradient_accumulation_steps == 1


def trained_in_a_cell_that_runs_twice(library):
    """The weights, and how often the optimizer stepped: objects stay prepared, the Accelerator is made anew."""
    model, optimizer = parts()
    pairs = TensorDataset(*[tensor.double() for tensor in data(10)])
    loader = DataLoader(pairs, batch_size=1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for accumulation in (4, 5):
        accelerator = importlib.import_module(library).Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        train(accelerator, loader, model, optimizer)
        assert accelerator.sync_gradients
        accelerator.end_training()
    forget_states(library)
    return model.weight.tolist(), len(steps)


def test_a_cell_that_runs_twice_goes_on_with_what_it_has_prepared():
    """The windows of the new Accelerator reach the loader and the optimizer that an earlier one has prepared."""
    weights, steps = trained_in_a_cell_that_runs_twice("common.accelerator")
    assert steps == 3 + 2
    pytest.importorskip("accelerate")
    assert trained_in_a_cell_that_runs_twice("accelerate") == (weights, steps)


def test_a_second_accelerator_may_ask_for_another_compiler():
    first = Accelerator(cpu=True)
    assert type(first.prepare(torch.nn.Linear(2, 2))).__name__ == "Linear"
    for asked in ({"dynamo_backend": "eager"}, {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}):
        second = Accelerator(cpu=True, **asked)
        assert second.state.dynamo_plugin.backend == "EAGER"
        assert type(second.prepare(torch.nn.Linear(2, 2))).__name__ == "OptimizedModule"
    third = Accelerator(cpu=True)  # asks for none
    assert third.state.dynamo_plugin.backend == "EAGER"


def test_objects_that_cannot_be_registered_are_named_with_their_places():
    pytest.importorskip("accelerate")

    def places(library, *objects):
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        with pytest.raises(ValueError) as error:
            accelerator.register_for_checkpointing(*objects)
        return re.findall(r"Item at index (\d)", str(error.value))

    wrong = torch.ones(1)
    valid = torch.nn.Linear(1, 1)
    assert places(OURS, wrong, wrong, valid) == places(THEIRS, wrong, wrong, valid) == ["0", "1"]
    assert places(OURS, valid, wrong) == ["1"]
    assert places(THEIRS, valid, wrong) == ["0"]  # its place among the wrong ones
