"""fp16 with its loss scaler and bf16 work on the CPU too."""

import copy

import pytest
import torch

from common.accelerator import Accelerator
from common.accelerator.utils import AutocastKwargs, GradScalerKwargs


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
    outputs = model(torch.ones(2, 4))
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
    assert clone(torch.ones(1, 4))["logits"].item() == 0 != model(torch.ones(1, 4))["logits"].item()


def test_unwrapping_can_restore_the_scripts_forward():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(Recording())
    assert accelerator.unwrap_model(model)(torch.ones(1, 4))["logits"].dtype == torch.float32
    assert model.output.dtype == torch.bfloat16
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain(torch.ones(1, 4))["logits"].dtype == torch.float32 and plain.output.dtype == torch.float32


def fp16_parts(fused=False, **scaler):
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**scaler)], cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, reference


def test_fp16_trains_on_the_cpu_to_nearly_the_float32_weights():
    accelerator, model, optimizer, reference = fp16_parts(init_scale=2.0**10)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    for _ in range(5):
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        assert model.weight.grad.abs().max() > 100  # the loss really is scaled
        optimizer.step()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(reference(x), y).backward()
        sgd.step()
        sgd.zero_grad()
    torch.testing.assert_close(model.weight, reference.weight, rtol=0, atol=5e-3)
    assert not accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_the_scheduler_and_halves_the_scale(fused):
    # A fused optimizer's step always runs, and its kernel leaves the weights alone.
    accelerator, model, optimizer, _ = fp16_parts(init_scale=2.0**10, fused=fused)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    before = model.weight.detach().clone()
    for factor, skipped in ((float("inf"), True), (1.0, False)):
        accelerator.backward(factor * model(torch.ones(2, 4)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped is skipped
        assert torch.equal(model.weight, before) is skipped
        assert scheduler.scheduler.last_epoch == (0 if skipped else 1)
    assert accelerator.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("order", ["one after the other", "together"])
def test_clipping_twice_and_with_several_optimizers_in_one_window_is_safe(order):
    # https://github.com/huggingface/accelerate/issues/641: "unscale_() has already been called".
    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
        cpu=True,
    )
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    idle = torch.nn.Linear(4, 1)  # its optimizer has no gradients, ever
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (*models, idle)]
    references = copy.deepcopy(models)
    prepared = accelerator.prepare(*models, idle, *optimizers)
    models, optimizers = prepared[:2], prepared[3:]
    x = torch.randn(6, 4)
    for _ in range(2):
        for _ in range(2):
            with accelerator.accumulate(*models):
                for model, optimizer in zip(models, optimizers, strict=False):
                    accelerator.backward(100 * model(x).square().mean())
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    if order == "one after the other":
                        optimizer.step()
                        optimizer.zero_grad()
                if order == "together":
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        for reference in references:
            (100 * reference(x).square().mean()).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for model, reference in zip(models, references, strict=True):
        torch.testing.assert_close(model.weight, reference.weight, rtol=0, atol=2e-3)


def test_gradients_that_the_model_drops_after_clipping_leave_the_next_step_alone():
    # A script that leaves a step out, for instance because the norm is too large, and clears with the model's method.
    accelerator, model, optimizer, reference = fp16_parts()
    x = torch.randn(3, 4)
    for drops in (True, False):
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        if drops:
            model.zero_grad()
    optimizer.step()
    reference(x).square().mean().backward()
    torch.testing.assert_close(model.weight, reference.weight - 0.1 * reference.weight.grad, rtol=0, atol=2e-3)


def test_of_two_optimizers_that_are_clipped_together_one_may_step_more_rarely():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    torch.manual_seed(0)
    often, rarely = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    before = copy.deepcopy(rarely)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (often, rarely)]
    often, rarely, steps_often, steps_rarely = accelerator.prepare(often, rarely, *optimizers)
    x = torch.randn(3, 4)
    parameters = [*often.parameters(), *rarely.parameters()]
    for step in range(2):
        accelerator.backward(often(x).square().mean())
        accelerator.backward(rarely(x).square().mean())
        accelerator.clip_grad_norm_(parameters, 1e3)  # more than theirs, less than that of scaled ones
        steps_often.step()
        if step == 1:
            steps_rarely.step()
        often.zero_grad()
        rarely.zero_grad()
    before(x).square().mean().backward()
    expected = before.weight - 0.1 * before.weight.grad
    torch.testing.assert_close(rarely.weight, expected, rtol=0, atol=2e-3)


def test_a_backward_between_another_optimizers_clipping_and_its_step_is_no_mistake():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    references = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    x = torch.randn(3, 4)
    accelerator.backward(second(x).square().mean())
    accelerator.backward(first(x).square().mean())
    accelerator.clip_grad_norm_(first.parameters(), 1e6)
    optimizers[1].step()
    optimizers[1].zero_grad()
    accelerator.backward(second(x).square().mean())  # adapts the scale, for a step has been made
    optimizers[0].step()
    for model, reference in zip((first, second), references, strict=True):
        reference(x).square().mean().backward()
        expected = reference.weight - 0.1 * reference.weight.grad
        torch.testing.assert_close(model.weight, expected, rtol=0, atol=2e-3)


def test_clipping_leaves_the_scaled_gradients_of_an_unfinished_window_alone():
    # https://github.com/huggingface/accelerate/issues/641: the original unscales them, and then raises.
    accelerator, model, optimizer, _ = fp16_parts(init_scale=8.0)
    accelerator.gradient_accumulation_steps = 2
    x = torch.randn(6, 4)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(1000 * model(x).square().mean())
            before = model.weight.grad.clone()
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            accelerator.clip_grad_value_(model.parameters(), 0.01)
            expected = torch.nn.utils.get_total_norm([before, torch.zeros(1)]) / 8
            assert norm >= expected > 1
            if accelerator.sync_gradients:
                assert model.weight.grad.abs().max() <= 0.01
            else:
                assert torch.equal(model.weight.grad, before)
            optimizer.step()
            optimizer.zero_grad()


def test_a_prepared_optimizer_under_fp16_still_sees_skipped_steps_after_a_copy():
    _, _, optimizer, _ = fp16_parts()
    clone = copy.deepcopy(optimizer)
    parameter = clone.param_groups[0]["params"][0]
    for gradient, skipped in ((float("inf"), True), (1.0, False)):
        parameter.grad = torch.full_like(parameter, gradient)
        clone.scaler.scale(torch.ones(()))
        clone.step()
        assert clone.step_was_skipped is skipped


def some_steps_of_fp16(accelerator, model, optimizer, steps=1, factor=1.0):
    for _ in range(steps):
        accelerator.backward(factor * model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()


def test_loading_right_after_a_step_brings_the_saved_scale_back(tmp_path):
    accelerator, model, optimizer, _ = fp16_parts(init_scale=2.0**10)
    some_steps_of_fp16(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "c")
    some_steps_of_fp16(accelerator, model, optimizer, factor=float("inf"))
    accelerator.load_state(tmp_path / "c")
    assert accelerator.scaler.get_scale() == 2.0**10
    assert accelerator.scaler.state_dict()["_growth_tracker"] == 1
    some_steps_of_fp16(accelerator, model, optimizer)
    assert not accelerator.optimizer_step_was_skipped


def test_loading_between_clipping_and_the_step_forgets_that_gradients_were_unscaled(tmp_path):
    accelerator, model, *_ = fp16_parts(init_scale=2.0**10)
    accelerator.gradient_accumulation_steps = 2
    accelerator.step = 1  # within a window, so that the checkpoint has gradients
    accelerator.backward(model(torch.ones(2, 4)).mean())
    accelerator.save_state(tmp_path / "c")
    for _ in range(2):
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        assert model.weight.grad.tolist() == [[0.5] * 4]
        accelerator.load_state(tmp_path / "c")
    assert accelerator.scaler.get_scale() == 2.0**10


def test_an_optimizer_that_was_not_prepared_is_stepped_with_through_the_scaler():
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**10, growth_interval=2)], cpu=True
    )
    model = accelerator.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(2, 4)).mean())
        accelerator.unscale_gradients(optimizer)
        assert model.weight.grad.tolist() == [[1.0] * 4]
        accelerator.scaler.step(optimizer)
        accelerator.scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before - 0.5)
        assert accelerator.scaler.get_scale() == (2.0**10 if step == 0 else 2.0**11)
