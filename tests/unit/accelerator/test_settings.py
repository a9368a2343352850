"""Settings of an Accelerator: from the script or the launcher; contradictions and what is out of scope are refused."""

import pytest
import torch

from common.accelerator import Accelerator, utils
from common.accelerator.utils import AutocastKwargs, GradientAccumulationPlugin, KwargsHandler, TorchDynamoPlugin
from tests.peers import import_or_skip


@pytest.mark.parametrize("option", ["deepspeed_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config"])
def test_settings_out_of_scope_are_refused_and_empty_ones_pass(option):
    Accelerator(cpu=True, **{option: None})
    with pytest.raises(NotImplementedError, match="out of scope"):
        Accelerator(cpu=True, **{option: object()})


STEPS_TWICE = {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(2)}


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"mixed_precision": "fp8"}, NotImplementedError, "fp8"),
        ({"gradient_accumulation_steps": 0}, ValueError, "at least one micro-batch, not 0"),
        ({"kwargs_handlers": [KwargsHandler()]}, NotImplementedError, "KwargsHandler"),
        ({"kwargs_handlers": [object()]}, AssertionError, "Unsupported kwargs handler"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ValueError, "You can only pass one <class"),
        (STEPS_TWICE, ValueError, "gradient_accumulation"),
    ],
)
def test_contradictory_settings_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        Accelerator(cpu=True, **settings)


def test_settings_of_the_launcher_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16" and accelerator.gradient_accumulation_steps == 4
    assert accelerator.state.dynamo_plugin.to_kwargs() == {"backend": "eager"}


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("ACCELERATE_MIXED_PRECISION", "Unknown mixed_precision mode: none"),
        ("ACCELERATE_USE_CPU", "invalid truth value 'none'"),
    ],
)
def test_a_variable_with_the_value_none_is_refused(variable, message, monkeypatch):
    """The original trains in float32 where it does not know the precision."""
    monkeypatch.setenv(variable, "none")
    with pytest.raises(ValueError, match=message):
        Accelerator()


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("GradScalerKwargs", {"growth_interval": 5}),
        ("DistributedDataParallelKwargs", {"find_unused_parameters": True, "comm_state_option": {"a": 1}}),
        ("TorchDynamoPlugin", {"backend": "inductor", "mode": "max-autotune", "dynamic": True}),
        ("GradientAccumulationPlugin", {"num_steps": 3, "sync_each_batch": True}),
    ],
)
def test_handlers_give_only_what_differs_from_the_defaults(name, kwargs):
    theirs = getattr(import_or_skip("accelerate.utils"), name)
    ours = getattr(utils, name)
    assert ours().to_kwargs() == theirs().to_kwargs() == {}
    assert ours(**kwargs).to_kwargs() == theirs(**kwargs).to_kwargs() != {}


def test_a_second_accelerator_keeps_the_precision():
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3, cpu=True)
    with pytest.raises(ValueError, match="already runs with 'bf16'"):
        Accelerator(mixed_precision="no", cpu=True)
    first.end_training()
    assert first.is_main_process and first.mixed_precision == "bf16"
    second = Accelerator(mixed_precision="no", cpu=True)
    assert second.mixed_precision == "no" and second.gradient_accumulation_steps == 1


@pytest.mark.parametrize("asked", [{"dynamo_backend": "eager"}, {"dynamo_plugin": TorchDynamoPlugin(backend="eager")}])
def test_a_second_accelerator_may_ask_for_another_compiler(asked):
    def kind_of_prepared(accelerator):
        return type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__

    assert kind_of_prepared(Accelerator(cpu=True)) == "Linear"
    assert kind_of_prepared(Accelerator(cpu=True, **asked)) == "OptimizedModule"
    assert kind_of_prepared(Accelerator(cpu=True)) == "OptimizedModule"  # asks for none
