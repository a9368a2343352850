"""Random trainings by a Trainer: the same weights, logs, evaluations and best checkpoint on both libraries.

A seed draws the data, the sizes, the schedule, the loss, when to log, evaluate and save.
"""

import copy
import importlib
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.bits import comparable, comparable_logs, digest, number_as_text
from tests.parity.random_scripts import Kind, choices_of, draw_from, one_of
from tests.toys import Net, Points, Stream, loss_per_item

SCHEDULES = {
    "linear": [None],
    "cosine": [None, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{"num_cycles": 2}],
    "cosine_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-3, "num_cycles": 1}],
    "polynomial": [None, {"power": 2.0, "lr_end": 1e-3}],
    "inverse_sqrt": [None, {"timescale": 7}],
    "warmup_stable_decay": [
        {"num_decay_steps": 2},
        {"num_decay_steps": 3, "warmup_type": "cosine", "decay_type": "1-sqrt"},
    ],
    "constant": [None],
    "constant_with_warmup": [None],
    "reduce_lr_on_plateau": [{"patience": 0, "factor": 0.5}],
}


class NormedNet(Net):
    """A network with a norm; where the first number of a batch is below `nan_below`, its loss is logged as NaN."""

    def __init__(self, dropout: float, nan_below: float = -math.inf) -> None:
        super().__init__()
        self.linear = nn.Sequential(
            nn.Linear(16, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 10)
        )
        self.nan_below = nan_below

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        if labels is not None and x[0, 0] < self.nan_below:
            # The gradients stay finite.
            outputs["loss"] = outputs["loss"] + (torch.tensor(math.nan) - outputs["loss"]).detach()
        return outputs


class NetWithKeywords(NormedNet):
    """Divides its loss by the items of the whole step itself, as the models of transformers do."""

    def forward(self, x, labels=None, **kwargs):
        outputs = super().forward(x, labels)
        if labels is None or kwargs.get("num_items_in_batch") is None:
            return outputs
        return outputs | {"loss": loss_per_item(outputs, labels, **kwargs)}


def metrics_of(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": right.mean(), "spread": prediction.predictions.std(), "count": len(right)}


ARGUMENTS = {
    "gradient_accumulation_steps": [1, 1, 2, 3],
    "learning_rate": [0.05, 0.01],
    "lr_scheduler_type": list(SCHEDULES),
    "optim": ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"],
    "weight_decay": [0.0, 0.1],
    "max_grad_norm": [0.0, 0.5, 1.0],
    "warmup_steps": [0, 0, 2, 0.3],
    "seed": [1, 42],
    "data_seed": [None, None, 7],
    "dataloader_drop_last": [False] * 4 + [True],
    "logging_nan_inf_filter": [True] * 4 + [False],
    "logging_strategy": ["steps", "epoch", "no"],
    "logging_steps": [1, 2, 3, 0.4],
    "logging_first_step": [False, False, True],
    "eval_strategy": ["steps", "epoch", "no"],
    "eval_steps": [1, 2, 3],
    "eval_delay": [0, 0, 2],
    "save_strategy": ["no", "no", "steps", "epoch"],
    "save_steps": [1, 2, 4],
    "save_total_limit": [None, 2],
    "metric_for_best_model": [None, "loss", "accuracy", "eval_spread"],
}
BATCHES = {"per_device_train_batch_size": [1, 2, 3, 4, 6], "per_device_eval_batch_size": [2, 4, 6]}
LENGTHS = [*({"num_train_epochs": epochs} for epochs in (1, 2, 1.5, 3)), *({"max_steps": steps} for steps in (1, 5, 9))]
LOADING = {
    "split_batches": [False] * 5 + [True],
    "use_seedable_sampler": [True] * 4 + [False],
    "dispatch_batches": [None, None, None, True, False],
}


@dataclass
class Script:
    """The settings of a training; the Trainer gets `arguments`, and with them its `accelerator_config`."""

    processes: int
    train: int  # Samples.
    arguments: dict[str, Any]
    accelerator_config: dict[str, Any]
    steps: float = one_of([1, 2, 3.5, 4.2])  # Optimizer steps of an epoch.
    evaluate: int = one_of([5, 12, 24, 31])  # Samples.
    stream: bool = one_of({False: 6, True: 1})
    loss: str = one_of(["model", "function", "keywords", "override", "sometimes_nan"])
    dropout: float = one_of([0.0, 0.3])
    best: str = one_of(["watched", "saved", "loaded"])  # The model that is best by a metric.
    early_stopping: bool = one_of({False: 2, True: 1})
    evaluate_afterwards: bool = one_of([False, True])
    train_twice: bool = one_of({False: 6, True: 1})


def draw(seed: int, processes: int) -> Script:
    generator = random.Random(seed)
    settings = draw_from(choices_of(Script), generator)
    arguments = draw_from(ARGUMENTS, generator) | generator.choice(LENGTHS)
    loading = draw_from(LOADING, generator)
    for name, sizes in BATCHES.items():
        arguments[name] = generator.choice(sizes) * processes
    arguments["lr_scheduler_kwargs"] = generator.choice(SCHEDULES[arguments["lr_scheduler_type"]])
    samples_per_step = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    samples = int(settings["steps"] * samples_per_step) + generator.randint(0, 3)
    if settings["stream"]:
        arguments["max_steps"] = generator.randint(1, 9)
    script = Script(processes, samples, arguments, loading, **settings)
    avoid_refusals(script)
    return script


def avoid_refusals(script: Script) -> None:
    arguments = script.arguments
    # An epoch has a batch.
    if "max_steps" not in arguments and script.train < arguments["per_device_train_batch_size"] * script.processes:
        arguments["dataloader_drop_last"] = False
    # A plateau is one of the evaluations.
    if arguments["lr_scheduler_type"] == "reduce_lr_on_plateau":
        arguments["eval_strategy"] = "epoch"
    # Evaluations give the metric, and the metric says which model is best and when to stop early.
    if arguments["eval_strategy"] == "no":
        arguments["metric_for_best_model"] = None
    if arguments["metric_for_best_model"] is None:
        script.early_stopping = False
    elif script.best != "watched":
        arguments["load_best_model_at_end"] = script.best == "loaded"
        # A model that may be loaded is saved when it is evaluated.
        arguments["save_strategy"] = arguments["eval_strategy"] if script.best == "loaded" else "best"
        arguments["save_steps"] = arguments["eval_steps"]


def without_known_differences(script: Script) -> Script:
    script = copy.deepcopy(script)
    arguments = script.arguments
    loading = script.accelerator_config
    # The original divides by zero where all steps are a warm-up. Ours:
    # `test_a_polynomial_may_have_a_training_that_is_all_warm_up`.
    if arguments["lr_scheduler_type"] == "polynomial":
        arguments["warmup_steps"] = 0
    # Where the main process splits the last step, the original evaluates the first rank's loss alone; and in unequal
    # steps it counts repeated samples. Ours: `test_an_evaluation_does_not_depend_on_the_number_of_processes`.
    if loading["split_batches"] and loading["dispatch_batches"]:
        loading["dispatch_batches"] = False
    # With the tail the original drops an evaluation's last step, too. Ours: `test_argument_dataloader_drop_last`.
    if script.processes > 1 or arguments["dataloader_drop_last"]:
        parts = 1 if loading["split_batches"] else script.processes
        steps = 1 if script.evaluate < 20 else 3
        script.evaluate = steps * arguments["per_device_eval_batch_size"] * parts
    # Over a stream without a whole step the original never ends. Ours:
    # `test_a_stream_that_is_too_short_for_a_step_ends_the_training`.
    if script.stream:
        script.train *= script.processes
    return script


def make_trainer(library: str, script: Script, folder: str) -> Any:
    module = importlib.import_module(library)

    class OverridingTrainer(module.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            loss = F.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "label_names": ["labels"]}
    settings |= script.arguments
    args = module.TrainingArguments(folder, accelerator_config=script.accelerator_config, **settings)
    torch.manual_seed(3)
    loss = script.loss
    network = NetWithKeywords if loss == "keywords" else NormedNet
    model = network(script.dropout, nan_below=-0.5 if loss == "sometimes_nan" else -math.inf)
    trainer_class = OverridingTrainer if loss == "override" else module.Trainer
    train_set = Points(script.train)
    if script.stream:
        train_set = Stream(train_set)
    callbacks = [module.EarlyStoppingCallback(1)] if script.early_stopping else []
    return trainer_class(
        model,
        args,
        train_dataset=train_set,
        eval_dataset=Points(script.evaluate),
        compute_metrics=metrics_of,
        compute_loss_func=loss_per_item if loss == "function" else None,
        callbacks=callbacks,
    )


def run(library: str, script: Script, folder: str, seen: dict[str, Any]) -> None:
    trainer = make_trainer(library, script, folder)
    output = trainer.train()
    seen["histories"] = [comparable_logs(trainer.state.log_history)]
    if script.train_twice:
        trainer.train()
        seen["histories"].append(comparable_logs(trainer.state.log_history))
    seen["evaluation"] = comparable(trainer.evaluate()) if script.evaluate_afterwards else None
    state = trainer.state
    best = state.best_model_checkpoint
    seen["weights"] = {name: digest(tensor) for name, tensor in trainer.model.state_dict().items()}
    seen["next_random_number"] = torch.rand(()).item()
    seen["training_loss"] = number_as_text(output.training_loss)
    seen["metrics"] = comparable(output.metrics)
    seen["steps"] = (state.global_step, state.max_steps, state.epoch, state.num_train_epochs)
    seen["best"] = (number_as_text(state.best_metric), state.best_global_step, best and best.rpartition("/")[2])


TRAINERS = Kind("common.trainer", "transformers", draw, without_known_differences, run)
