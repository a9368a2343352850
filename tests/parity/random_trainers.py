"""Random trainings by a Trainer: the same weights, logs, evaluations and best checkpoint on both libraries.

A seed draws the data, the sizes, the schedule, the loss, when to log, evaluate and save.
"""

import hashlib
import importlib
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.random_scripts import Kind
from tests.states import OURS, THEIRS, forget_states, reset_states
from tests.toys import Points, Stream

# What takes another time in each run.
TIMINGS = ("_runtime", "_per_second", "_preparation_time")
SCHEDULES = {
    "linear": [None],
    "cosine": [None, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{"num_cycles": 2}],
    "cosine_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-3, "num_cycles": 1}],
    "cosine_warmup_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-3, "warmup_lr_rate": 0.2}],
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
LOSSES = ("model", "function", "keywords", "override", "sometimes_nan")


class Net(nn.Module):
    """A layer, dropout and a norm; returns its loss if it is given labels."""

    def __init__(self, dropout: float, nan_below: float | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 12)
        self.norm = nn.LayerNorm(12)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(12, 10)
        self.nan_below = nan_below

    def logits(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))

    def forward(self, x, labels=None):
        logits = self.logits(x)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits, labels)
        if self.nan_below is not None and x[0, 0] < self.nan_below:
            # Of the number that is logged alone: the gradients stay finite.
            loss = loss + (torch.tensor(float("nan")) - loss).detach()
        return {"loss": loss, "logits": logits}


class NetWithKeywords(Net):
    """Divides its loss by the items of the whole step itself, as the models of transformers do."""

    def forward(self, x, labels=None, **kwargs):
        logits = self.logits(x)
        if labels is None:
            return {"logits": logits}
        num_items = kwargs.get("num_items_in_batch")
        if num_items is None:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels, reduction="sum") / num_items, "logits": logits}


def token_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def metrics_of(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": right.mean(), "spread": prediction.predictions.std(), "count": len(right)}


def draw_configuration(seed: int, world_size: int) -> dict[str, Any]:
    """A training drawn from all that the two Trainers have in common; the same for the same seed."""
    draw = random.Random(seed)
    accumulation = draw.choice([1, 1, 2, 3])
    batch_size = draw.choice([1, 2, 3, 4, 6]) * world_size
    arguments = {
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": draw.choice([2, 4, 6]) * world_size,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": draw.choice([0.05, 0.01]),
        "optim": draw.choice(["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "max_grad_norm": draw.choice([0.0, 0.5, 1.0]),
        "warmup_steps": draw.choice([0, 0, 2, 0.3]),
        "seed": draw.choice([1, 42]),
        "data_seed": draw.choice([None, None, 7]),
        "dataloader_drop_last": draw.random() < 0.2,
        "logging_nan_inf_filter": draw.random() < 0.8,
    }
    stream = draw.random() < 0.15
    if stream or draw.random() < 0.4:
        arguments["max_steps"] = draw.randint(1, 9)
    else:
        arguments["num_train_epochs"] = draw.choice([1, 2, 1.5, 3])
    name = draw.choice(list(SCHEDULES))
    arguments["lr_scheduler_type"] = name
    arguments["lr_scheduler_kwargs"] = draw.choice(SCHEDULES[name])
    draw_strategies(draw, arguments)
    split_batches = draw.random() < 0.15
    arguments["accelerator_config"] = {
        "split_batches": split_batches,
        "use_seedable_sampler": draw.random() < 0.8,
        "dispatch_batches": draw.choice([None, None, None, True, False]),
    }
    steps = draw.choice([1, 2, 3.5, 4.2])
    evaluate = draw.choice([5, 12, 24, 31])
    if world_size > 1:  # in steps of equal parts: the original counts repeated samples in the loss
        samples_per_step = arguments["per_device_eval_batch_size"] * (1 if split_batches else world_size)
        evaluate = draw.choice([1, 3]) * samples_per_step
    return {
        "arguments": arguments,
        "train": max(1, int(steps * batch_size * accumulation) + draw.randint(0, 3)),
        "evaluate": evaluate,
        "stream": stream,
        "loss": draw.choice(LOSSES),
        "dropout": draw.choice([0.0, 0.3]),
        "early_stopping": arguments.get("metric_for_best_model") is not None and draw.random() < 0.3,
        "evaluate_afterwards": draw.random() < 0.5,
        "train_twice": draw.random() < 0.15,
    }


def draw_strategies(draw: random.Random, arguments: dict[str, Any]) -> None:
    """When to log, evaluate and save."""
    arguments["logging_strategy"] = draw.choice(["steps", "epoch", "no"])
    arguments["logging_steps"] = draw.choice([1, 2, 3, 0.4])
    arguments["logging_first_step"] = draw.random() < 0.3
    arguments["eval_strategy"] = draw.choice(["steps", "epoch", "no"])
    if arguments["lr_scheduler_type"] == "reduce_lr_on_plateau":
        arguments["eval_strategy"] = draw.choice(["steps", "epoch"])
    arguments["eval_steps"] = draw.choice([1, 2, 3])
    arguments["eval_delay"] = draw.choice([0, 0, 2])
    arguments["save_strategy"] = draw.choice(["no", "no", "steps", "epoch"])
    arguments["save_steps"] = draw.choice([1, 2, 4])
    arguments["save_total_limit"] = draw.choice([None, 2])
    if arguments["eval_strategy"] == "no":
        return
    arguments["metric_for_best_model"] = draw.choice([None, "loss", "accuracy", "eval_spread"])
    if arguments["metric_for_best_model"] is None:
        return
    kind = draw.choice(["watched", "loaded", "best"])
    if kind == "loaded":
        arguments["load_best_model_at_end"] = True
        arguments["save_strategy"] = arguments["eval_strategy"]
        arguments["save_steps"] = arguments["eval_steps"] * draw.choice([1, 2])
    elif kind == "best":
        arguments["save_strategy"] = "best"
        arguments["load_best_model_at_end"] = draw.random() < 0.5


def make_trainer(library: str, config: dict[str, Any], folder: str) -> Any:
    module = importlib.import_module(library)
    base = module.Trainer

    class OverridingTrainer(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            loss = F.cross_entropy(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "label_names": ["labels"]}
    args = module.TrainingArguments(folder, **settings, **config["arguments"])
    torch.manual_seed(3)
    loss = config["loss"]
    network = NetWithKeywords if loss == "keywords" else Net
    model = network(config["dropout"], nan_below=-0.5 if loss == "sometimes_nan" else None)
    return (OverridingTrainer if loss == "override" else base)(
        model,
        args,
        train_dataset=Stream(Points(config["train"])) if config["stream"] else Points(config["train"]),
        eval_dataset=Points(config["evaluate"]),
        compute_metrics=metrics_of,
        compute_loss_func=token_loss if loss == "function" else None,
        callbacks=[module.EarlyStoppingCallback(1)] if config["early_stopping"] else None,
    )


def outcome(library: str, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """All that is compared of a training: every number is exact."""
    trainer = make_trainer(library, config, folder)
    output = trainer.train()
    histories = [comparable_logs(trainer.state.log_history)]
    if config["train_twice"]:
        trainer.train()
        histories.append(comparable_logs(trainer.state.log_history))
    evaluation = comparable(trainer.evaluate()) if config["evaluate_afterwards"] else None
    state = trainer.state
    best = state.best_model_checkpoint
    return {
        "error": None,
        "weights": {name: digest(tensor) for name, tensor in trainer.model.state_dict().items()},
        "next_random_number": torch.rand(()).item(),
        "training_loss": exact(output.training_loss),
        "metrics": comparable(output.metrics),
        "histories": histories,
        "evaluation": evaluation,
        "steps": (state.global_step, state.max_steps, state.epoch, state.num_train_epochs),
        "best": (exact(state.best_metric), state.best_global_step, best and best.rpartition("/")[2]),
    }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:12]


def exact(value: Any) -> Any:
    """Something that is equal to itself, as NaN is not, and to no other number."""
    return repr(float(value)) if isinstance(value, float) else value


def comparable(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: exact(value) for name, value in sorted(logs.items()) if not name.endswith(TIMINGS)}


def comparable_logs(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [comparable(entry) for entry in log_history]


def reset(library: str) -> None:
    """Let the next training of this process begin as in a new process."""
    forget_states(core_of(library))


def core_of(library: str) -> str:
    """The library on which this Trainer stands."""
    return THEIRS if library == "transformers" else OURS


def run(library: str, configurations: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """The outcomes of trainings one after the other, or what they raised; all ranks are given the same folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes: list[dict[str, Any]] = []
    for number, config in enumerate(configurations):
        torch.manual_seed(11)
        try:
            outcomes.append(outcome(library, config, f"{folder}/{library}-{number}"))
        except Exception as error:
            outcomes.append({"error": f"{type(error).__name__}: {error}"})
        finally:
            reset_states(core_of(library))
    reset(library)
    torch.set_num_threads(threads)
    return outcomes


def hangs(config: dict[str, Any], ours: dict[str, Any], processes: int) -> str | None:
    """Whether transformers' Trainer would go on for ever."""
    is_endless = str(ours["error"]).startswith("ValueError: the stream ends after")
    return "a stream that is too short for a step" if is_endless else None


def last_batch_of_an_evaluation(config: dict[str, Any], ours: Any, theirs: Any) -> str | None:
    """With `dataloader_drop_last` the original drops it; what an evaluation steers differs from there on."""
    arguments = config["arguments"]
    if not arguments["dataloader_drop_last"]:
        return None
    if theirs["error"]:  # nothing was evaluated
        return ".*"
    if arguments.get("metric_for_best_model") or arguments["lr_scheduler_type"] == "reduce_lr_on_plateau":
        return "(?!error).*"
    return r"(histories\.\d+\.\d+|evaluation)\.eval_\w+|best\.0"


def losses_of_whole_last_steps(config: dict[str, Any], ours: Any, theirs: Any) -> str | None:
    """Of a last step that the main process splits, the original counts the first rank's loss alone."""
    arguments = config["arguments"]
    loading = arguments["accelerator_config"]
    is_split_by_main_process = loading["split_batches"] and loading["dispatch_batches"]
    if not is_split_by_main_process or config["evaluate"] % arguments["per_device_eval_batch_size"]:
        return None
    if arguments["lr_scheduler_type"] == "reduce_lr_on_plateau" or arguments.get("metric_for_best_model") == "loss":
        return "(?!error).*"
    return r"(histories\.\d+\.\d+|evaluation)\.eval_loss"


def polynomial_without_decay(config: dict[str, Any], ours: Any, theirs: Any) -> str | None:
    """The original divides by the number of steps after the warm-up, of which there are none."""
    return ".*" if str(theirs["error"]).startswith("ZeroDivisionError") else None


ROWS = {
    "has a training that is all warm-up, with the schedule `polynomial`": polynomial_without_decay,
    "`dataloader_drop_last` also drops the last batch of an evaluation": last_batch_of_an_evaluation,
    "`split_batches` with `dispatch_batches` loses the last losses of an evaluation": losses_of_whole_last_steps,
}
TRAINERS = Kind(("common.trainer", "transformers"), draw_configuration, run, ROWS, hangs)
