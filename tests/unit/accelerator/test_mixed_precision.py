"""fp16 with its loss scaler and bf16, on the CPU too: gradients are unscaled once, however a script clips and steps."""

import copy
import math
import weakref
from functools import partial

import pytest
import torch

from common.accelerator import Accelerator
from common.accelerator.state import AcceleratorState
from common.accelerator.utils import AutocastKwargs, GradScalerKwargs

X = torch.tensor([[1.0, -1.0, 0.5, 0.25], [0.5, 2.0, -1.0, 1.0], [-0.5, 1.0, 1.5, -1.0]])


class Recording(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x):
        self.output = self.linear(x)
        return {"logits": self.output, "index": torch.tensor([1])}


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_forward_runs_in_half_precision_and_gives_float32(precision, dtype):
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = accelerator.prepare(Recording())
    outputs = model(X)
    assert model.output.dtype == dtype and outputs["logits"].dtype == torch.float32
    assert outputs["index"].dtype == torch.int64
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_a_copy_of_a_prepared_model_runs_its_own_weights():
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(Recording())
    clone = copy.deepcopy(model)
    torch.nn.init.zeros_(clone.linear.weight)
    torch.nn.init.zeros_(clone.linear.bias)
    assert (clone(X)["logits"] == 0).all() and (model(X)["logits"] != 0).all()


def test_a_scaler_keeps_no_model_alive_that_was_left_between_clipping_and_step():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model = accelerator.prepare(Recording())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
    accelerator.backward(model(X)["logits"].sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    left = weakref.ref(optimizer.optimizer)
    del model
    (optimizer,) = accelerator.free_memory(optimizer)
    assert left() is None and accelerator.scaler.get_scale() > 0


def test_unwrapping_can_restore_the_scripts_forward():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(Recording())
    accelerator.unwrap_model(model)(X)
    assert model.output.dtype == torch.bfloat16
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain(X)
    assert plain.output.dtype == torch.float32


def test_a_forgotten_model_can_be_prepared_in_another_precision(tmp_path):
    model = Recording()
    Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)(X)
    assert model.output.dtype == torch.bfloat16, "prepared already, it keeps its forward"
    accelerator.forget_model(model)
    accelerator.save_state(tmp_path)
    assert not list(tmp_path.glob("model*"))
    accelerator.prepare(model)(X)
    assert model.output.dtype == torch.float32


def fp16(accumulation=1, init_scale=2.0**10, **scaler):
    return Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=init_scale, **scaler)],
        cpu=True,
    )


def new_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 1)


def prepare(accelerator, seed=0):
    model = new_model(seed)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def prepare_several(accelerator, count):
    """A list of so many new models, whose seeds are 0, 1, …, and one of their optimizers."""
    pairs = [prepare(accelerator, seed) for seed in range(count)]
    return [model for model, _ in pairs], [optimizer for _, optimizer in pairs]


def loss_of(model):
    return model(X).square().mean()


def assert_steps_in_float32(model, seed=0, steps=1, max_norm=None):
    """`model` has the weights after so many steps in float32 from those of `seed`, within what float16 can hold."""
    reference = new_model(seed)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(steps):
        loss_of(reference).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.weight, reference.weight, rtol=0, atol=2e-3)


def test_fp16_trains_on_the_cpu_to_nearly_the_float32_weights():
    accelerator = fp16()
    model, optimizer = prepare(accelerator)
    for _ in range(5):
        accelerator.backward(loss_of(model))
        assert model.weight.grad.abs().max() > 100  # the loss really is scaled
        optimizer.step()
        optimizer.zero_grad()
        assert not accelerator.optimizer_step_was_skipped
    assert_steps_in_float32(model, steps=5)
    accelerator.backward(loss_of(model.half()))
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        optimizer.step()
    assert accelerator.scaler.get_scale() == 2.0**10, "what raised was no step"


def test_a_second_step_divides_the_gradients_again():
    accelerator = fp16(init_scale=8.0)
    model, optimizer = prepare(accelerator)
    accelerator.backward(loss_of(model))
    optimizer.step()
    expected = model.weight - 0.1 * model.weight.grad / 8
    optimizer.step()
    torch.testing.assert_close(model.weight, expected)


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer; its base class is there for `isinstance` alone, and has not been initialized."""

    def __init__(self, parameters, lr):
        self.optimizer = torch.optim.SGD(parameters, lr)
        self.param_groups = self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


# A fused optimizer's step always runs, and its kernel leaves the weights alone.
@pytest.mark.parametrize("make", [torch.optim.SGD, partial(torch.optim.SGD, fused=True), Wrapping])
def test_an_overflow_skips_step_and_schedule_and_halves_the_scale(make):
    accelerator = fp16()
    model = new_model()
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = model.weight.detach().clone()
    for factor, skipped, rate in ((math.inf, True, 0.1), (1.0, False, 0.05)):
        accelerator.backward(factor * loss_of(model))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is skipped
        assert torch.equal(model.weight, before) is skipped
        assert scheduler.get_last_lr() == [rate]
    assert accelerator.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("is_scaled", [True, False])
def test_gradients_that_are_clipped_twice_are_unscaled_once(is_scaled):
    # https://github.com/huggingface/accelerate/issues/641: "unscale_() has already been called".
    accelerator = fp16(accumulation=2, init_scale=8.0, enabled=is_scaled)
    models, optimizers = prepare_several(accelerator, 3)
    for _ in range(4):
        with accelerator.accumulate(*models):
            for model in models[:2]:  # the third has no gradients, ever
                accelerator.backward(loss_of(model))
                accelerator.clip_grad_norm_(model.parameters(), 0.4)
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for seed, model in enumerate(models[:2]):
        assert_steps_in_float32(model, seed, steps=2, max_norm=0.2)


def test_a_script_may_unscale_gradients_and_clip_them_by_torch():
    accelerator = fp16()
    model, optimizer = prepare(accelerator)
    accelerator.backward(loss_of(model))
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer.optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    accelerator.scaler.load_state_dict(accelerator.scaler.state_dict())  # changes nothing
    optimizer.step()
    assert_steps_in_float32(model, max_norm=0.2)


def test_gradients_may_be_dropped_after_clipping():
    # A script that leaves a step out, for instance because the norm is too large, and clears with the model's method.
    accelerator = fp16()
    model, optimizer = prepare(accelerator)
    for drops in (True, False):
        accelerator.backward(loss_of(model))
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        if drops:
            model.zero_grad()
    optimizer.step()
    assert_steps_in_float32(model)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_overflow_in_dropped_gradients_halves_the_scale_that_is_saved(in_place):
    accelerator = fp16()
    model, optimizer = prepare(accelerator)
    accelerator.backward(math.inf * loss_of(model))
    accelerator.clip_grad_norm_(model.parameters(), 1e6)
    if in_place:
        optimizer.zero_grad(set_to_none=False)
    else:
        model.zero_grad()  # The optimizer does not see this.
    assert accelerator.scaler.state_dict()["scale"] == 2.0**9


def test_two_optimizers_clipped_together_step_apart():
    """Clipping unscales both. The one that makes no step must unscale its next gradients again."""
    accelerator = fp16()
    (often, rarely), (steps_often, steps_rarely) = prepare_several(accelerator, 2)
    parameters = [*often.parameters(), *rarely.parameters()]
    for step in range(2):
        accelerator.backward(loss_of(often))
        accelerator.backward(loss_of(rarely))
        accelerator.clip_grad_norm_(parameters, 1e3)  # more than theirs, less than that of scaled ones
        steps_often.step()
        if step == 1:
            steps_rarely.step()
        often.zero_grad()
        rarely.zero_grad()
    assert_steps_in_float32(often, seed=0, steps=2)
    assert_steps_in_float32(rarely, seed=1)


@pytest.mark.parametrize(("overflowing", "scale_between"), [(0, 2.0**10), (1, 2.0**9)])
def test_an_overflow_skips_its_own_optimizer_alone(overflowing, scale_between):
    """The scale is halved at the step that is skipped, and not again at that of the other optimizer."""
    accelerator = fp16()
    models, optimizers = prepare_several(accelerator, 2)
    for index, model in enumerate(models):
        accelerator.backward((math.inf if index == overflowing else 1.0) * loss_of(model))
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
    for index, scale in ((1, scale_between), (0, 2.0**9)):
        optimizers[index].step()
        assert optimizers[index].step_was_skipped is (index == overflowing)
        assert accelerator.scaler.get_scale() == scale


def test_a_backward_may_lie_between_clipping_and_step():
    accelerator = fp16()
    (first, second), (steps_first, steps_second) = prepare_several(accelerator, 2)
    accelerator.backward(loss_of(second))
    accelerator.backward(loss_of(first))
    accelerator.clip_grad_norm_(first.parameters(), 1e6)
    steps_second.step()
    steps_second.zero_grad()
    accelerator.backward(loss_of(second))  # adapts the scale, for a step has been made
    steps_first.step()
    assert_steps_in_float32(first, seed=0)
    assert_steps_in_float32(second, seed=1)


def test_clipping_within_a_window_changes_nothing():
    # https://github.com/huggingface/accelerate/issues/641: the original unscales them, and then raises.
    accelerator = fp16(accumulation=2, init_scale=8.0)
    model, optimizer = prepare(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(1000 * loss_of(model))
            scaled = model.weight.grad.clone()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.clip_grad_value_(model.parameters(), 0.01)
            assert norm >= scaled.norm() / 8 > 1  # the norm is that of the whole model, unscaled
            if accelerator.sync_gradients:
                assert model.weight.grad.abs().max() <= 0.01
            else:
                assert torch.equal(model.weight.grad, scaled)
            optimizer.step()
            optimizer.zero_grad()


def test_an_unprepared_optimizer_steps_through_the_scaler():
    accelerator = fp16(growth_interval=2)
    model = accelerator.prepare(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        accelerator.backward(loss_of(model))
        accelerator.scaler.unscale_(optimizer)
        assert model.weight.grad.abs().max() < 10
        accelerator.scaler.step(optimizer)
        accelerator.scaler.update()
        optimizer.zero_grad()
    assert_steps_in_float32(model, steps=3)
    assert accelerator.scaler.get_scale() == 2.0**11


def test_loading_brings_the_saved_scale_back(tmp_path):
    accelerator = fp16()
    model, optimizer = prepare(accelerator)

    def step(factor=1.0):
        accelerator.backward(factor * loss_of(model))
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.save_state(tmp_path / "c")
    step(math.inf)
    accelerator.load_state(tmp_path / "c")
    assert accelerator.scaler.get_scale() == 2.0**10
    assert accelerator.scaler.state_dict()["_growth_tracker"] == 1
    step()
    assert not accelerator.optimizer_step_was_skipped


def test_loading_after_clipping_forgets_the_unscaling(tmp_path):
    accelerator = fp16(accumulation=2)
    model, _ = prepare(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(2 * loss_of(model))
    accelerator.save_state(tmp_path / "c")  # within a window, so that the checkpoint has gradients
    scaled = model.weight.grad.clone()
    with accelerator.accumulate(model):
        for _ in range(2):
            accelerator.clip_grad_norm_(model.parameters(), 1e6)
            assert torch.equal(model.weight.grad, scaled / 2.0**10)
            accelerator.load_state(tmp_path / "c")
    assert accelerator.scaler.get_scale() == 2.0**10
