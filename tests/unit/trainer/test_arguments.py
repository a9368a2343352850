"""Each argument, changed alone, changes what it says; what is impossible is refused."""

import json
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from common.trainer import AcceleratorConfig, Trainer, TrainerCallback, TrainingArguments
from tests.toys import Net, Points, seeded_net
from tests.unit.trainer.toy import accuracy, make_trainer, trained, weights

STEPS = 5  # 40 samples in batches of 8


def steps_of(trainer) -> int:
    return trainer.train().global_step


def logged(trainer, name: str) -> list[float]:
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def check_output_dir(tmp_path):
    make_trainer(tmp_path / "elsewhere", save_strategy="epoch").train()
    assert checkpoints(tmp_path / "elsewhere") == ["checkpoint-5"]


def check_per_device_train_batch_size(tmp_path):
    assert steps_of(make_trainer(tmp_path, per_device_train_batch_size=4)) == 10


def check_per_device_eval_batch_size(tmp_path):
    sizes = []
    trainer = make_trainer(tmp_path, evaluate=40, per_device_eval_batch_size=16)
    step = trainer.prediction_step

    def measured_step(model, inputs, *args, **kwargs):
        sizes.append(len(inputs["x"]))
        return step(model, inputs, *args, **kwargs)

    trainer.prediction_step = measured_step
    trainer.evaluate()
    assert sizes == [16, 16, 8]


def check_gradient_accumulation_steps(tmp_path):
    assert steps_of(make_trainer(tmp_path, gradient_accumulation_steps=2)) == 3


def check_num_train_epochs(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=2.4)
    assert steps_of(trainer) == 12
    assert trainer.state.epoch == pytest.approx(2.4)


def check_max_steps(tmp_path):
    assert steps_of(make_trainer(tmp_path, max_steps=7)) == 7


def check_learning_rate(tmp_path):
    trainer = make_trainer(tmp_path, learning_rate=0.25, lr_scheduler_type="constant", logging_steps=1)
    assert logged(trainer, "learning_rate") == [0.25] * STEPS


def check_weight_decay(tmp_path):
    still = {"learning_rate": 0.5, "max_steps": 1, "lr_scheduler_type": "constant", "optim": "sgd"}
    shrunk, plain = trained(tmp_path, weight_decay=0.1, **still), trained(tmp_path, **still)
    start = torch.cat([p.detach().flatten() for p in seeded_net().parameters()])
    assert torch.allclose(plain[:160] - shrunk[:160], 0.5 * 0.1 * start[:160], atol=1e-6)
    assert torch.equal(plain[160:], shrunk[160:])  # the bias


def check_adam(tmp_path, name, value):
    trainer = make_trainer(tmp_path, **{name: value})
    trainer.train()
    group = trainer.optimizer.param_groups[0]
    assert {"adam_beta1": group["betas"][0], "adam_beta2": group["betas"][1], "adam_epsilon": group["eps"]}[
        name
    ] == value
    assert not torch.equal(weights(trainer), trained(tmp_path))


def check_adam_beta1(tmp_path):
    check_adam(tmp_path, "adam_beta1", 0.5)


def check_adam_beta2(tmp_path):
    check_adam(tmp_path, "adam_beta2", 0.5)


def check_adam_epsilon(tmp_path):
    check_adam(tmp_path, "adam_epsilon", 1e-2)


def check_max_grad_norm(tmp_path):
    start = torch.cat([p.detach().flatten() for p in seeded_net().parameters()])
    one_step = {"optim": "sgd", "max_steps": 1, "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    clipped = trained(tmp_path, max_grad_norm=0.01, **one_step) - start
    free = trained(tmp_path, max_grad_norm=0, **one_step) - start
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert free.norm() > 0.1


def check_optim(tmp_path):
    classes = {
        "adamw_torch": "AdamW",
        "adamw_torch_fused": "AdamW",
        "sgd": "SGD",
        "adagrad": "Adagrad",
        "rmsprop": "RMSprop",
    }
    for name, expected in classes.items():
        trainer = make_trainer(tmp_path, optim=name)
        optimizer = trainer.create_optimizer()
        assert type(optimizer).__name__ == expected
        assert bool(optimizer.defaults.get("fused")) == (name == "adamw_torch_fused")
        trainer.train()


def check_lr_scheduler_type(tmp_path):
    rates = {}
    for name in ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"):
        trainer = make_trainer(tmp_path, lr_scheduler_type=name, learning_rate=1.0, warmup_steps=2, logging_steps=1)
        rates[name] = logged(trainer, "learning_rate")
    assert rates["linear"] == pytest.approx([0, 0.5, 1, 2 / 3, 1 / 3])
    assert rates["cosine"] == pytest.approx([0, 0.5, 1, 0.75, 0.25])
    assert rates["constant"] == [1.0] * 5
    assert rates["constant_with_warmup"] == pytest.approx([0, 0.5, 1, 1, 1])
    assert rates["inverse_sqrt"] == pytest.approx([0, 0.5, 1, (2 / 3) ** 0.5, 0.5**0.5])


def test_reduce_lr_on_plateau_watches_the_evaluations(tmp_path):
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "num_train_epochs": 14}
    trainer = make_trainer(tmp_path, evaluate=8, metric_for_best_model="stuck", greater_is_better=False, **plateau)
    trainer.compute_metrics = lambda prediction: {"stuck": 1.0}
    trainer.train()
    assert isinstance(trainer.lr_scheduler.scheduler, ReduceLROnPlateau)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1)


def check_warmup_steps(tmp_path):
    trainer = make_trainer(tmp_path, warmup_steps=2, logging_steps=1, lr_scheduler_type="constant_with_warmup")
    assert logged(trainer, "learning_rate") == pytest.approx([0, 0.025, 0.05, 0.05, 0.05])
    assert TrainingArguments(warmup_steps=0.3).get_warmup_steps(10) == 3


def check_eval_strategy(tmp_path):
    for strategy, steps in (("epoch", [5, 10]), ("steps", [4, 8, 10]), ("no", [])):
        trainer = make_trainer(tmp_path, evaluate=8, eval_strategy=strategy, eval_steps=4, num_train_epochs=2)
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == steps


def check_eval_steps(tmp_path):
    for eval_steps, count in ((2, 3), (0.2, 5)):
        trainer = make_trainer(tmp_path, evaluate=8, eval_strategy="steps", eval_steps=eval_steps)
        assert len(logged(trainer, "eval_loss")) == count


def check_logging_strategy(tmp_path):
    for strategy, count in (("epoch", 2), ("steps", 3), ("no", 0)):
        trainer = make_trainer(tmp_path, logging_strategy=strategy, logging_steps=3, num_train_epochs=2)
        assert len(logged(trainer, "loss")) == count


def check_logging_steps(tmp_path):
    assert len(logged(make_trainer(tmp_path, logging_steps=2), "loss")) == 2
    assert len(logged(make_trainer(tmp_path, logging_steps=0.5), "loss")) == 1


def check_save_strategy(tmp_path):
    for strategy, names in (("epoch", ["checkpoint-5"]), ("steps", ["checkpoint-4", "checkpoint-5"]), ("no", [])):
        make_trainer(tmp_path / strategy, save_strategy=strategy, save_steps=4).train()
        assert checkpoints(tmp_path / strategy) == names
    best = {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "worse", "num_train_epochs": 3}
    trainer = make_trainer(tmp_path / "best", evaluate=8, **best)
    trainer.compute_metrics = lambda prediction: {"worse": -trainer.state.global_step}
    trainer.train()
    assert checkpoints(tmp_path / "best") == ["checkpoint-5"]


def check_save_steps(tmp_path):
    make_trainer(tmp_path / "a", save_strategy="steps", save_steps=2).train()
    assert checkpoints(tmp_path / "a") == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    make_trainer(tmp_path / "b", save_strategy="steps", save_steps=0.6).train()
    assert checkpoints(tmp_path / "b") == ["checkpoint-3", "checkpoint-5"]


def check_save_total_limit(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert checkpoints(tmp_path) == ["checkpoint-4", "checkpoint-5"]


def best_at_step_10(tmp_path, **arguments) -> Trainer:
    """Evaluated and saved three times, with the metrics 2, 3 and 1."""
    every_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
    trainer = make_trainer(tmp_path, evaluate=8, **(every_epoch | arguments))
    trainer.compute_metrics = lambda prediction: {"score": {5: 2, 10: 3, 15: 1}[trainer.state.global_step]}
    trainer.train()
    return trainer


def check_load_best_model_at_end(tmp_path):
    trainer = best_at_step_10(tmp_path, load_best_model_at_end=True, metric_for_best_model="score")
    straight = best_at_step_10(tmp_path / "last", metric_for_best_model="score")
    two_epochs = trained(tmp_path / "two", num_train_epochs=3, max_steps=15)
    assert torch.equal(weights(straight), two_epochs)
    assert not torch.equal(weights(trainer), weights(straight))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")


def check_metric_for_best_model(tmp_path):
    state = best_at_step_10(tmp_path, metric_for_best_model="eval_score").state
    assert (state.best_metric, state.best_global_step) == (3, 10)
    assert state.best_model_checkpoint.endswith("checkpoint-10")
    with pytest.raises(KeyError, match="eval_absent"):
        best_at_step_10(tmp_path, metric_for_best_model="absent")


def check_greater_is_better(tmp_path):
    state = best_at_step_10(tmp_path, metric_for_best_model="score", greater_is_better=False).state
    assert (state.best_metric, state.best_global_step) == (1, 15)
    assert TrainingArguments(metric_for_best_model="eval_loss").greater_is_better is False
    assert TrainingArguments(metric_for_best_model="f1").greater_is_better is True


def check_seed(tmp_path):
    results = [trained(tmp_path, seed=seed, extra={"model_init": lambda: Net()}, data_seed=0) for seed in (1, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def inputs_of(trainer) -> torch.Tensor:
    """What the model sees in training, in order."""
    inputs = []
    trainer.model.register_forward_pre_hook(lambda module, args, kwargs: inputs.append(kwargs["x"]), with_kwargs=True)
    trainer.train()
    return torch.cat(inputs)


def check_data_seed(tmp_path):
    seen = {}
    for data_seed in (5, 6):
        trainer = make_trainer(tmp_path, data_seed=data_seed, num_train_epochs=2)
        seen[data_seed] = inputs_of(trainer)
    for data_seed, order in seen.items():
        for epoch in (0, 1):
            expected = torch.randperm(40, generator=torch.Generator().manual_seed(data_seed + epoch))
            assert torch.equal(order[40 * epoch :][:40], Points(40).x[expected])


def check_bf16(tmp_path):
    dtypes = []
    for bf16 in (True, False):
        trainer = make_trainer(tmp_path, bf16=bf16)
        trainer.model.linear.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
        trainer.train()
    assert set(dtypes[:STEPS]) == {torch.bfloat16} and set(dtypes[STEPS:]) == {torch.float32}


def check_fp16(tmp_path):
    trainer = make_trainer(tmp_path, fp16=True)
    dtypes = []
    trainer.model.linear.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    trainer.train()
    assert set(dtypes) == {torch.float16}
    assert trainer.accelerator.scaler is not None


def check_dataloader_num_workers(tmp_path):
    trainer = make_trainer(tmp_path, dataloader_num_workers=1)
    assert trainer.get_train_dataloader().num_workers == 1
    trainer.train()
    assert torch.equal(weights(trainer), trained(tmp_path))


def check_dataloader_drop_last(tmp_path):
    assert steps_of(make_trainer(tmp_path, train=44)) == 6
    assert steps_of(make_trainer(tmp_path, train=44, dataloader_drop_last=True)) == 5
    # The batches are dropped, and not the windows: 40 samples are 5 batches, of which the last is a window.
    accumulated = {"train": 44, "gradient_accumulation_steps": 2}
    assert steps_of(make_trainer(tmp_path, **accumulated)) == 3
    assert steps_of(make_trainer(tmp_path, **accumulated, dataloader_drop_last=True)) == 3
    # Evaluation never drops a sample.
    assert len(make_trainer(tmp_path, dataloader_drop_last=True).predict(Points(13)).predictions) == 13


def check_lr_scheduler_kwargs(tmp_path):
    constant = {"lr_scheduler_type": "polynomial", "learning_rate": 1.0, "logging_steps": 1}
    trainer = make_trainer(tmp_path, lr_scheduler_kwargs={"power": 2.0, "lr_end": 0.5}, **constant)
    assert logged(trainer, "learning_rate") == pytest.approx([0.5 + 0.5 * (1 - step / 5) ** 2 for step in range(5)])
    with pytest.raises(TypeError, match="powder"):
        make_trainer(tmp_path, lr_scheduler_kwargs={"powder": 2.0}, **constant).train()


def check_eval_delay(tmp_path):
    for strategy, delay, steps in (("steps", 3, [4, 5]), ("epoch", 2, [10, 15])):
        epochs = 1 if strategy == "steps" else 3
        settings = {"eval_strategy": strategy, "eval_steps": 2, "eval_delay": delay, "num_train_epochs": epochs}
        trainer = make_trainer(tmp_path, evaluate=8, **settings)
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == steps


def check_logging_first_step(tmp_path):
    for given, steps in ((True, [1, 3]), (False, [3])):
        trainer = make_trainer(tmp_path, logging_first_step=given, logging_steps=3)
        trainer.train()
        assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == steps


class SometimesNan(Net):
    """Says in every second step that its loss is NaN; the gradients are those of the true loss."""

    steps = 0

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        self.steps += 1
        if self.steps % 2 == 0:
            outputs["loss"] = outputs["loss"] + (torch.tensor(float("nan")) - outputs["loss"]).detach()
        return outputs


def check_logging_nan_inf_filter(tmp_path):
    for given, expected in ((True, True), (False, False)):
        trainer = make_trainer(tmp_path, model=SometimesNan(), logging_nan_inf_filter=given, logging_steps=2)
        trainer.eval_dataset = Points(40)
        assert all(math.isfinite(loss) for loss in logged(trainer, "loss")) is expected
        assert math.isfinite(trainer.evaluate()["eval_loss"]) is expected


def check_accelerator_config(tmp_path):
    given = {"split_batches": True, "dispatch_batches": False, "even_batches": False, "non_blocking": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    for config in (given, str(path), AcceleratorConfig(**given)):
        accelerator = make_trainer(tmp_path, accelerator_config=config).accelerator
        assert accelerator.split_batches is True and accelerator.even_batches is False
        assert accelerator.dispatch_batches is False and accelerator.non_blocking is True
    accumulated = {"gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}}
    assert steps_of(make_trainer(tmp_path, accelerator_config=accumulated)) == 3
    with pytest.raises(ValueError, match="num_steps"):
        make_trainer(tmp_path, accelerator_config=accumulated, gradient_accumulation_steps=2)
    with pytest.raises(TypeError, match="spilt_batches"):
        TrainingArguments(accelerator_config={"spilt_batches": True})


def check_dataloader_pin_memory(tmp_path):
    trainer = make_trainer(tmp_path)
    assert not trainer.get_train_dataloader().pin_memory  # on the CPU there is nothing to pin for
    trainer.accelerator = SimpleNamespace(device=torch.device("cuda"), process_index=0)
    assert trainer._loader_maker().for_training(Points(8)).pin_memory
    trainer.args.dataloader_pin_memory = False
    assert not trainer._loader_maker().for_training(Points(8)).pin_memory


class Junk(Points):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"junk": "text"}


def check_remove_unused_columns(tmp_path):
    make_trainer(tmp_path, extra={"train_dataset": Junk(40), "data_collator": stack_all}).train()
    with pytest.raises(ValueError, match="junk"):
        kept = {"train_dataset": Junk(40), "data_collator": stack_all}
        make_trainer(tmp_path, remove_unused_columns=False, extra=kept).train()


def stack_all(samples):
    if "junk" in samples[0]:
        raise ValueError("junk")
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def check_report_to(tmp_path):
    make_trainer(tmp_path, report_to="jsonl", logging_steps=1).train()
    found = list(tmp_path.rglob("*.jsonl"))
    assert len(found) == 1
    records = [json.loads(line) for line in found[0].read_text().splitlines()]
    assert any("train/loss" in str(record) for record in records)
    assert make_trainer(tmp_path, report_to="none").args.report_to == []


def check_run_name(tmp_path):
    make_trainer(tmp_path, report_to="jsonl", run_name="a_name_of_its_own").train()
    found = list(tmp_path.rglob("*.jsonl"))
    assert any("a_name_of_its_own" in str(path) + path.read_text() for path in found)


def check_disable_tqdm(tmp_path):
    def reporter(disable):
        args = TrainingArguments(str(tmp_path), disable_tqdm=disable, use_cpu=True)
        return type(Trainer(Net(), args).callback_handler.callbacks[1]).__name__

    assert (reporter(True), reporter(False)) == ("PrinterCallback", "ProgressCallback")


class Renamed(Points):
    def __getitem__(self, index):
        return {"x": self.x[index], "answers": self.labels[index]}


class RenamedNet(Net):
    def forward(self, x, answers=None):
        return super().forward(x, answers)


def check_label_names(tmp_path):
    args = {"extra": {"train_dataset": Renamed(40), "eval_dataset": Renamed(8), "compute_metrics": accuracy}}
    trainer = make_trainer(tmp_path, label_names=["answers"], model=RenamedNet(), **args)
    assert "eval_accuracy" in trainer.evaluate()
    assert "eval_accuracy" not in make_trainer(tmp_path, model=RenamedNet(), **args).evaluate()


class Counter(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def check_resume_from_checkpoint(tmp_path):
    """It is for scripts, which pass it on."""
    make_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    straight = trained(tmp_path / "straight")
    for given, steps in ((str(tmp_path / "checkpoint-2"), 3), (True, 0), (None, STEPS)):
        trainer = make_trainer(tmp_path, resume_from_checkpoint=given)
        taken = Counter()
        trainer.add_callback(taken)
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        assert taken.steps == steps
        assert torch.equal(weights(trainer), straight)
    nowhere = make_trainer(tmp_path / "none", resume_from_checkpoint=True)
    assert nowhere.train().global_step == STEPS
    with pytest.raises(ValueError, match="no complete checkpoint"):
        nowhere.train(resume_from_checkpoint=True)


def check_for_scripts(tmp_path, name):
    """They change what the script reads, and nothing else."""
    trainer = make_trainer(tmp_path, **{name: True})
    assert getattr(trainer.args, name)
    trainer.train()
    assert torch.equal(weights(trainer), trained(tmp_path))


def check_do_train(tmp_path):
    check_for_scripts(tmp_path, "do_train")


def check_do_eval(tmp_path):
    check_for_scripts(tmp_path, "do_eval")
    assert TrainingArguments(eval_strategy="epoch").do_eval and not TrainingArguments().do_eval


def check_do_predict(tmp_path):
    check_for_scripts(tmp_path, "do_predict")


def check_torch_compile(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: (compiled.append(options), model)[1])
    make_trainer(tmp_path, max_steps=1).train()
    assert compiled == []
    make_trainer(tmp_path, max_steps=1, torch_compile=True).train()
    assert [options["backend"] for options in compiled] == ["inductor"]


def check_use_cpu(tmp_path):
    assert make_trainer(tmp_path, use_cpu=True).accelerator.device == torch.device("cpu")


def check_ddp_find_unused_parameters(tmp_path):
    for given, expected in ((None, True), (True, True), (False, False)):
        trainer = make_trainer(tmp_path, ddp_find_unused_parameters=given)
        assert trainer.accelerator.ddp_handler.find_unused_parameters is expected


def check_ddp_timeout(tmp_path):
    timeouts = [make_trainer(tmp_path, **given).accelerator.init_handler.timeout for given in ({}, {"ddp_timeout": 7})]
    assert [timeout.total_seconds() for timeout in timeouts] == [1800, 7]


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}


@pytest.mark.parametrize("name", [field.name for field in fields(TrainingArguments)])
def test_changing_one_argument_changes_what_it_says(name, tmp_path, monkeypatch):
    check = CHECKS[name]
    check(tmp_path, monkeypatch) if check.__code__.co_argcount == 2 else check(tmp_path)


IMPOSSIBLE = {
    "per_device_train_batch_size": [0, 1.5],
    "per_device_eval_batch_size": [0],
    "gradient_accumulation_steps": [0],
    "num_train_epochs": [-1],
    "ddp_timeout": [0],
    "max_steps": [0, -2],
    "learning_rate": [-1],
    "weight_decay": [-1],
    "adam_beta1": [1.0, -0.1],
    "adam_beta2": [1.0],
    "adam_epsilon": [0],
    "max_grad_norm": [-1],
    "optim": ["adam"],
    "lr_scheduler_type": ["cosin"],
    "warmup_steps": [-1, 2.5],
    "logging_strategy": ["sometimes", "best"],
    "eval_strategy": ["sometimes"],
    "save_strategy": ["sometimes"],
    "logging_steps": [0, -1, 2.5],
    "eval_steps": [-1],
    "save_steps": [0],
    "save_total_limit": [0],
    "dataloader_num_workers": [-1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_impossible_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r} but must be"):
        TrainingArguments(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bf16": True, "fp16": True}, "choose one"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval_strategy"),
        ({"save_strategy": "best"}, "eval_strategy"),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, "metric_for_best_model"),
        ({"load_best_model_at_end": True}, "eval_strategy"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, "save only after evaluations"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4},
            "save only after evaluations",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingArguments(**arguments)


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="learning_rat"):
        TrainingArguments(learning_rat=1)
    with pytest.raises(TypeError, match="processing"):
        Trainer(Net(), processing=1)


def test_a_trainer_refuses_what_cannot_work(tmp_path):
    for extra, message in (
        ({"model": Net(), "model_init": Net}, "either a `model` or `model_init` argument, but not both"),
        ({"model_init": Net, "optimizers": (torch.optim.SGD(Net().parameters()), None)}, "optimizers"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(args=TrainingArguments(str(tmp_path), use_cpu=True), **extra)
    with pytest.raises(RuntimeError, match=r"requires either a `model` or `model_init` argument$"):
        Trainer(args=TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(AttributeError, match="'int' object has no attribute 'on_init_end'"):
        Trainer(Net(), TrainingArguments(str(tmp_path), use_cpu=True), callbacks=[3])
    with pytest.raises(ValueError, match="eval_dataset"):
        make_trainer(tmp_path, eval_strategy="epoch")
    with pytest.raises(ValueError, match="dataset"):
        Trainer(Net(), TrainingArguments(str(tmp_path), use_cpu=True)).train()
    with pytest.raises(ValueError, match="no loss"):
        unlabelled = TensorDataset(torch.randn(8, 16))
        make_trainer(tmp_path, extra={"train_dataset": unlabelled}).train()
    with pytest.raises(ValueError, match="no batch or no length"):
        make_trainer(tmp_path, train=3, dataloader_drop_last=True).train()


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "warmup_steps", "max_steps", "seed", "save_steps"])
def test_a_text_in_the_place_of_a_number_is_refused_by_name(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is '1e-3' but must be"):
        TrainingArguments(str(tmp_path), **{name: "1e-3"})


@pytest.mark.parametrize(
    "settings", [{}, {"accelerator_config": {"split_batches": True}, "lr_scheduler_type": "cosine"}]
)
def test_arguments_are_written_as_in_transformers(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    settings |= {"report_to": "none", "use_cpu": True, "label_names": ["labels"], "disable_tqdm": True}
    settings |= {"logging_steps": 5, "eval_steps": 5, "run_name": "a run", "per_device_eval_batch_size": 4}
    ours = TrainingArguments(str(tmp_path), **settings)
    theirs = transformers.TrainingArguments(str(tmp_path), **settings)
    for one, other in (
        (ours.to_dict(), theirs.to_dict()),
        (ours.to_sanitized_dict(), theirs.to_sanitized_dict()),
        (json.loads(ours.to_json_string()), json.loads(theirs.to_json_string())),
    ):
        common = one.keys() & other.keys()
        assert set(one) == common
        for name in common - {"dataloader_pin_memory"}:  # which it switches off on a CPU, where it has no effect
            assert one[name] == other[name], name
    for name in ("n_gpu", "train_batch_size", "eval_batch_size", "world_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_the_number_of_processes_is_known_before_the_group_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert TrainingArguments(str(tmp_path)).world_size == 4
