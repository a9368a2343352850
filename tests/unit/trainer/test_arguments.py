"""Most arguments, changed alone, have the effect that their name promises; what is impossible is refused.

Where transformers is installed, most are shown by a training on both libraries that ends with the same bits, and
otherwise than without the argument. Some have a test of their own.
"""

import importlib
import json
import logging
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils.data import TensorDataset

from common.accelerator import PartialState
from common.trainer import AcceleratorConfig, Trainer, TrainingArguments
from tests.states import forget_states
from tests.toys import Net, Points
from tests.unit.trainer.both import LIBRARIES, end, make, on_both, same_on_both
from tests.unit.trainer.toy import Junk, accuracy, make_trainer, trained_weights, weights

STEPWISE = {"eval_strategy": "steps", "eval_steps": 2}
BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}


class Change(NamedTuple):
    """An argument with a value that is not its default.

    Attributes:
        others: the arguments of both trainings, the one with it and the one without it.
    """

    name: str
    value: Any
    others: Mapping[str, Any] = MappingProxyType({})


# There are 3 steps in each of 2 epochs.
CHANGES = [
    Change("per_device_train_batch_size", 4),
    Change("per_device_eval_batch_size", 4, STEPWISE),
    Change("gradient_accumulation_steps", 2),
    Change("num_train_epochs", 2.4),
    Change("max_steps", 7),
    Change("learning_rate", 0.25),
    Change("weight_decay", 0.1),
    Change("adam_beta1", 0.5),
    Change("adam_beta2", 0.5),
    Change("adam_epsilon", 1e-2),
    Change("max_grad_norm", 0.01),
    Change("optim", "sgd"),
    Change("lr_scheduler_type", "constant", {"warmup_steps": 2}),
    Change("lr_scheduler_kwargs", {"num_cycles": 1.5}, {"lr_scheduler_type": "cosine"}),
    Change("warmup_steps", 2),
    Change("eval_strategy", "steps", {"eval_steps": 4}),
    Change("eval_steps", 4, STEPWISE),
    Change("eval_delay", 3, STEPWISE),
    Change("logging_strategy", "epoch"),
    Change("logging_steps", 2),
    Change("logging_first_step", True, {"logging_steps": 3}),
    Change("save_strategy", "steps", {"save_steps": 4}),
    Change("save_strategy", "best", {"eval_strategy": "epoch", "metric_for_best_model": "accuracy"}),
    Change("save_steps", 0.6, {"save_strategy": "steps"}),
    Change("save_total_limit", 2, {"save_strategy": "steps", "save_steps": 1}),
    Change(
        "load_best_model_at_end", True, BY_EPOCH | {"metric_for_best_model": "accuracy", "greater_is_better": False}
    ),
    Change("metric_for_best_model", "eval_accuracy", BY_EPOCH),
    Change("greater_is_better", False, BY_EPOCH | {"metric_for_best_model": "accuracy"}),
    Change("seed", 7),
    Change("data_seed", 5),
    Change("bf16", True),
    Change("prediction_loss_only", True, STEPWISE),
    Change("accelerator_config", {"split_batches": True, "use_seedable_sampler": False}),
    Change("dataloader_drop_last", True),
]
STATE = ("epoch", "global_step", "max_steps", "num_train_epochs", "train_batch_size", "best_metric", "best_global_step")


def outcome(library, folder, arguments) -> dict:
    """All that a training came to, each batch that the model was given, and the checkpoints that are left."""
    trainer = make(library, folder, extra={"compute_metrics": accuracy}, **arguments)
    forwards = []
    trainer.model.linear.register_forward_hook(
        lambda module, inputs, output: forwards.append((module.training, len(output), output.dtype))
    )
    trainer.train()
    return end(trainer) | {
        "forwards": forwards,
        "state": {name: getattr(trainer.state, name) for name in STATE},
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
    }


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.name}-{change.value}")
def test_an_argument_changes_what_it_changes_in_transformers(change, tmp_path, transformers):
    ours, theirs = on_both(outcome, tmp_path / "with", {**change.others, change.name: change.value})
    assert ours == theirs
    assert ours != outcome(importlib.import_module(LIBRARIES[0]), str(tmp_path / "without"), change.others)


def test_arguments_of_loader_workers(tmp_path):
    arguments = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 3}
    trainer = make_trainer(tmp_path, evaluate=9, eval_strategy="epoch", num_train_epochs=2, **arguments)
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
    trainer.train()
    assert torch.equal(weights(trainer), trained_weights(tmp_path, num_train_epochs=2))


@pytest.mark.parametrize("launchers", ["no", "bf16"])
def test_the_precision_is_that_of_the_arguments_or_else_of_the_launcher(launchers, tmp_path, transformers, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launchers)

    def precision(library, folder, **arguments):
        return library.TrainingArguments(folder, use_cpu=True, **arguments).mixed_precision

    assert same_on_both(precision, tmp_path) == launchers
    assert same_on_both(partial(precision, fp16=True), tmp_path) == "fp16"
    assert same_on_both(partial(precision, bf16=True), tmp_path) == "bf16"


def test_argument_log_level(tmp_path, transformers, monkeypatch):
    def script(library, folder):
        args = make(library, folder, log_level="info").args
        return {"of the process": args.get_process_log_level(), "of transformers": transformers.logging.get_verbosity()}

    assert same_on_both(script, tmp_path) == {"of the process": logging.INFO, "of transformers": logging.INFO}
    transformers.logging.set_verbosity_error()


def test_argument_dataloader_drop_last(tmp_path):
    """In the original an evaluation drops its last batch too."""
    assert len(make_trainer(tmp_path, dataloader_drop_last=True).predict(Points(13)).predictions) == 13


def test_arguments_of_the_accelerator(tmp_path):
    default = make_trainer(tmp_path).accelerator
    assert default.init_handler.timeout == timedelta(minutes=30)
    assert default.ddp_handler.find_unused_parameters is True
    config = AcceleratorConfig(dispatch_batches=False, non_blocking=True)
    ddp = {"ddp_timeout": 7, "ddp_find_unused_parameters": False}
    given = make_trainer(tmp_path, accelerator_config=config, **ddp).accelerator
    assert given.dataloader_config.dispatch_batches is False
    assert given.dataloader_config.non_blocking is True
    assert given.init_handler.timeout == timedelta(seconds=7)
    assert given.ddp_handler.find_unused_parameters is False


def test_argument_dataloader_pin_memory(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    assert not trainer.get_train_dataloader().pin_memory  # on the CPU there is nothing to pin for
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device("cuda"))
    assert trainer.get_train_dataloader().pin_memory
    trainer.args.dataloader_pin_memory = False
    assert not trainer.get_train_dataloader().pin_memory


class Table(Points):
    """A `Dataset` of the library `datasets`, as far as a Trainer uses it."""

    removed = ()

    def __init__(self, *column_names):
        super().__init__(4)
        self.column_names = column_names

    def remove_columns(self, names):
        self.removed = names
        return self


@pytest.fixture
def datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Table))


def test_columns_that_the_model_does_not_take_are_removed(tmp_path, datasets):
    trainer = make_trainer(tmp_path, extra={"data_collator": list})
    [sample, *_] = next(iter(trainer.get_eval_dataloader(Junk(4))))
    assert sample.keys() == {"x", "labels"}
    assert trainer.get_eval_dataloader(Table("x", "junk")).dataset.removed == ["junk"]
    with pytest.raises(ValueError, match="no column in common"):
        trainer.get_eval_dataloader(Table("junk"))


def test_argument_remove_unused_columns(tmp_path, datasets):
    trainer = make_trainer(tmp_path, remove_unused_columns=False, extra={"data_collator": list})
    [sample, *_] = next(iter(trainer.get_eval_dataloader(Junk(4))))
    assert sample.keys() == {"x", "labels", "junk"}
    assert trainer.get_eval_dataloader(Table("x", "junk")).dataset.removed == ()


def test_argument_label_names(tmp_path):
    points = Points(8)
    by_default = make_trainer(tmp_path).predict(points).label_ids
    assert torch.equal(torch.from_numpy(by_default), points.labels)
    by_name = make_trainer(tmp_path, label_names=["x"]).predict(points).label_ids
    assert torch.equal(torch.from_numpy(by_name), points.x)


def test_argument_torch_compile(tmp_path, monkeypatch):
    """The second evaluation compiles nothing."""
    graphs = []

    def note_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    real_compile = torch.compile
    compile_model = mock.Mock(side_effect=lambda model, **options: real_compile(model, backend=note_graph))
    monkeypatch.setattr(torch, "compile", compile_model)
    make_trainer(tmp_path, evaluate=8).evaluate()
    compile_model.assert_not_called()
    make_trainer(tmp_path, max_steps=1, torch_compile=True).train()
    assert len(graphs) == 1
    graphs.clear()
    trainer = make_trainer(tmp_path, evaluate=8, torch_compile=True)
    trainer.evaluate()
    trainer.evaluate()
    assert compile_model.call_args.kwargs["backend"] == "inductor"
    assert len(graphs) == 1


class SaysItsOptions(Net):
    is_activation_checkpointing = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.options = gradient_checkpointing_kwargs


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_argument_activation_checkpointing(name, tmp_path):
    """The method of the model that does it gets the options, and DDP hears of it."""
    options = {"use_reentrant": True}
    trainer = make_trainer(tmp_path, model=SaysItsOptions(), **{name: True, f"{name}_kwargs": options})
    trainer.train()
    assert trainer.model.options == options
    assert trainer.accelerator.ddp_handler.find_unused_parameters is False


def test_activation_checkpointing_needs_a_method_of_the_model(tmp_path):
    assert make_trainer(tmp_path, model=SaysItsOptions()).accelerator.ddp_handler.find_unused_parameters is True
    with pytest.raises(AttributeError, match="gradient_checkpointing_enable"):
        make_trainer(tmp_path, gradient_checkpointing=True).train()


def test_a_number_of_micro_batches_may_be_a_float(tmp_path):
    make_trainer(tmp_path, gradient_accumulation_steps=2.0).train()


def test_argument_use_cache(tmp_path):
    for use_cache in (False, True):
        model = Net()
        model.config = SimpleNamespace()
        make_trainer(tmp_path, model=model, use_cache=use_cache)
        assert model.config.use_cache is use_cache


def test_arguments_for_scripts(tmp_path):
    args = TrainingArguments(str(tmp_path), do_train=True, hub_token="a secret", eval_strategy="epoch")
    assert args.do_train and args.do_eval and not args.do_predict
    assert args.hub_token == "a secret"
    assert "secret" not in f"{args} {args.to_dict()}"
    torch.save(args.to_dict(), tmp_path / "settings.bin")
    torch.load(tmp_path / "settings.bin", weights_only=True)  # It refuses a Choice.


def test_a_command_line_has_the_flags_of_transformers(transformers):
    def flags(library):
        parser = transformers.HfArgumentParser(library.TrainingArguments)
        return {action.dest: (action.nargs, action.const, action.option_strings) for action in parser._actions}

    ours = flags(importlib.import_module(LIBRARIES[0]))
    theirs = flags(transformers)
    assert ours == {name: theirs[name] for name in ours}


def test_a_command_line_and_a_file_of_settings_are_parsed(tmp_path, transformers):
    parser = transformers.HfArgumentParser(TrainingArguments)
    given = {"learning_rate": 0.5, "gradient_checkpointing": True, "lr_scheduler_kwargs": {"num_cycles": 2}}
    flags = ["--learning_rate", "0.5", "--gradient_checkpointing", "--lr_scheduler_kwargs", '{"num_cycles": 2}']
    (of_flags,) = parser.parse_args_into_dataclasses(flags)
    assert vars(of_flags).items() >= given.items()
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(given))
    (of_file,) = parser.parse_json_file(file)
    assert vars(of_file).items() >= given.items()


@pytest.mark.skipif(torch.cuda.is_available(), reason="TensorFloat-32 is a matter of GPUs")
def test_argument_tf32(tmp_path):
    make_trainer(tmp_path, tf32=False)
    with pytest.raises(ValueError, match="tf32 needs a GPU"):
        make_trainer(tmp_path, tf32=True)


def test_argument_fsdp():
    """Trainings with FSDP are in test_processes.py."""
    with pytest.raises(ValueError, match="fsdp is 'full_shard offload' but must be True, or of the words full_shard"):
        TrainingArguments(fsdp="full_shard offload")
    with pytest.raises((NotImplementedError, ValueError), match="FSDP with cpu_offload=True is out of scope"):
        TrainingArguments(fsdp=True, fsdp_config={"fsdp_cpu_offload": True})


def test_a_metric_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(KeyError, match="eval_absent"):
        make_trainer(tmp_path, evaluate=8, eval_strategy="epoch", metric_for_best_model="absent").train()


IMPOSSIBLE = {
    "per_device_train_batch_size": [0, 1.5],
    "num_train_epochs": [-1],
    "max_steps": [0, float("inf")],
    "learning_rate": [-1, "1e-3"],
    "optim": ["adam"],
    "logging_steps": [0, 2.5],
    "save_steps": [0, float("inf")],
    "save_total_limit": [0],
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(name):
    for value in IMPOSSIBLE[name]:
        with pytest.raises(ValueError, match=f"{name} is {value!r} but must be"):
            TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"push_to_hub": True}, "push_to_hub must be "),
        ({"deepspeed": "zero.json"}, "deepspeed must be "),
        ({"debug": "underflow_overflow"}, "debug must be "),
        ({"bf16": True, "fp16": True}, "choose one"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval_strategy"),
        ({"save_strategy": "best"}, "eval_strategy"),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, "metric_for_best_model"),
        ({"load_best_model_at_end": True}, "eval_strategy"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "save_strategy must be 'best', or that of"),
    ],
)
def test_what_is_out_of_scope_and_values_that_exclude_each_other_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**arguments)


def test_shares_that_save_between_evaluations_are_refused_when_the_number_of_steps_is_known(tmp_path):
    """The original never notes a best model then."""
    shares = {"eval_strategy": "steps", "eval_steps": 0.1, "save_strategy": "steps", "save_steps": 0.3}
    trainer = make_trainer(tmp_path, evaluate=8, load_best_model_at_end=True, max_steps=25, **shares)
    with pytest.raises(ValueError, match=r"8 of 25 steps and eval_steps=0.1 are 3: save only after evaluations"):
        trainer.train()
    trainer.args.max_steps = 20
    assert trainer.train().global_step == 20


class OwnSamplers(Trainer):
    def _get_train_sampler(self, dataset):
        return range(len(dataset))

    _get_eval_sampler = _get_train_sampler


def test_a_trainer_needs_its_data_sets(tmp_path):
    with pytest.raises(ValueError, match="eval_dataset"):
        make_trainer(tmp_path, eval_strategy="epoch")
    trainer = OwnSamplers(Net(), TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match="needs a train_dataset"):
        trainer.train()
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        trainer.evaluate()


def test_a_training_needs_a_loss_and_a_batch(tmp_path):
    with pytest.raises(ValueError, match="no loss"):
        make_trainer(tmp_path, extra={"train_dataset": TensorDataset(torch.randn(8, 16))}).train()
    with pytest.raises(ValueError, match="no batch or no length"):
        make_trainer(tmp_path, train=3, dataloader_drop_last=True).train()


def test_the_defaults_are_those_of_transformers(tmp_path, transformers):
    def defaults(library):
        return library.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True).to_dict()

    ours = defaults(importlib.import_module(LIBRARIES[0]))
    theirs = defaults(transformers)
    assert theirs.pop("accelerator_config").items() >= ours.pop("accelerator_config").items()
    del ours["dataloader_pin_memory"]  # which it switches off on a CPU, where it has no effect
    assert ours == {name: theirs[name] for name in ours}


def test_none_is_what_it_is_in_transformers_where_that_takes_it(tmp_path, transformers, monkeypatch):
    def script(library, folder):
        args = library.Trainer(Net(), library.TrainingArguments(None, debug=None, use_cpu=True)).args
        return {"output_dir": args.output_dir, "debug": args.debug}

    monkeypatch.chdir(tmp_path)
    assert same_on_both(script, tmp_path) == {"output_dir": "trainer_output", "debug": []}


def test_arguments_start_nothing(tmp_path):
    forget_states()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    assert not PartialState._shared_state
    Trainer(Net(), arguments)
    assert PartialState._shared_state


def test_the_number_of_processes_is_known_before_the_group_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert TrainingArguments(str(tmp_path)).world_size == 4
