"""TrainingArguments: every setting of a run, checked when it is made."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.trainer.optimization import OPTIMIZERS, SCHEDULES


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return choices.__contains__, f"one of {', '.join(choices)}"


def _is_count(value: Any) -> bool:
    return value >= 1 and value == int(value)


def _is_interval(value: Any) -> bool:
    return 0 < value < 1 or _is_count(value)


# Names, what a value must fulfil, and how an error says it.
_REQUIREMENTS = (
    ("optim", *_one_of(*OPTIMIZERS)),
    ("lr_scheduler_type", *_one_of(*SCHEDULES)),
    ("logging_strategy eval_strategy", *_one_of("no", "steps", "epoch")),
    ("save_strategy", *_one_of("no", "steps", "epoch", "best")),
    ("per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps", _is_count, "whole, above 0"),
    ("save_total_limit", lambda value: value is None or _is_count(value), "whole and above 0, or None"),
    ("max_steps", lambda value: value == -1 or _is_count(value), "whole and above 0, or -1 for no limit"),
    ("logging_steps eval_steps save_steps", _is_interval, "whole and above 0, or a share below 1"),
    ("num_train_epochs adam_epsilon ddp_timeout", lambda value: value > 0, "above 0"),
    ("learning_rate weight_decay max_grad_norm dataloader_num_workers", lambda value: value >= 0, "0 or more"),
    ("adam_beta1 adam_beta2 warmup_ratio", lambda value: 0 <= value < 1, "in [0, 1)"),
    ("warmup_steps", lambda value: 0 <= value < 1 or _is_count(value), "whole, or a share below 1"),
)


@dataclass
class TrainingArguments:
    """The settings of one run, with the names and defaults of `transformers.TrainingArguments`.

    Making one starts nothing: no process group, no device, so that it can be made in a notebook and handed to
    launched processes. Steps are optimizer steps; batch sizes are samples per device and micro-batch, so that one
    step sees per_device_train_batch_size · gradient_accumulation_steps · processes samples.

    Args:
        output_dir: where checkpoints go, as `checkpoint-<step>/`.
        max_steps: ends training after so many steps and overrides `num_train_epochs`; required for a dataset
            without a length. -1: not set.
        optim: one of `OPTIMIZERS`. Weight decay spares biases and normalisation layers.
        lr_scheduler_type: one of `SCHEDULES`.
        warmup_steps: steps of linear warm-up, or below 1 the share of all steps. `warmup_ratio` is the older
            spelling of the share.
        max_grad_norm: clip the total norm of the gradients to this; 0 leaves them alone.
        logging_steps, eval_steps, save_steps: below 1, the share of all steps. `eval_steps` defaults to
            `logging_steps`.
        logging_strategy, eval_strategy, save_strategy: "no", "steps" or "epoch"; `save_strategy` also "best": after
            each evaluation that improves `metric_for_best_model`. `evaluation_strategy` is the older spelling.
        save_total_limit: keep so many checkpoints; the newest and the best are never deleted.
        metric_for_best_model: a key of the evaluation's metrics, with or without `eval_`; "loss" when one is needed.
        greater_is_better: by default True unless the metric's name ends in "loss".
        seed: of the weights that `model_init` draws and of everything random in training (rank r uses seed + r).
        data_seed: of the sample order, `seed` by default: epoch e visits `torch.randperm(n)` seeded with data_seed + e.
        dataloader_drop_last: drop the samples at an epoch's end that do not fill a whole optimizer step: with
            accumulation k on batches of b as with batches of k·b. Evaluation never drops a sample.
        dataloader_pin_memory: has no effect where the device is the CPU.
        remove_unused_columns: from samples that are dicts, drop keys that are neither parameters of the model's
            `forward` nor labels.
        report_to: "none", "all", or names of trackers that the accelerator knows.
        run_name: what the trackers call the run; by default the last part of `output_dir`.
        disable_tqdm: print plain lines in place of a progress bar; by default where stderr is no terminal.
        label_names: keys of a batch that hold labels; by default `forward`'s parameters with "label" in their name,
            else ["labels"].
        ddp_timeout: seconds that a collective waits for a missing rank before it raises.
        resume_from_checkpoint: what `Trainer.train` resumes from unless it is told: a folder, or True for the
            newest that is not damaged.

    Raises:
        TypeError: for a name that is not listed here.
        ValueError: for a value that is impossible alone or together with another.
    """

    output_dir: str = "trainer_output"
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    eval_strategy: str = "no"
    evaluation_strategy: str | None = None
    eval_steps: float | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 500
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    seed: int = 42
    data_seed: int | None = None
    bf16: bool = False
    fp16: bool = False
    dataloader_num_workers: int = 0
    dataloader_drop_last: bool = False
    dataloader_pin_memory: bool = True
    remove_unused_columns: bool = True
    report_to: str | list[str] = "none"
    run_name: str | None = None
    disable_tqdm: bool | None = None
    label_names: list[str] | None = None
    resume_from_checkpoint: str | bool | None = None
    torch_compile: bool = False
    use_cpu: bool = False
    ddp_find_unused_parameters: bool | None = None
    ddp_timeout: int = 1800

    def __post_init__(self) -> None:
        self.output_dir = os.path.expanduser(self.output_dir)
        self.data_seed = self.seed if self.data_seed is None else self.data_seed
        self.run_name = self.run_name or os.path.basename(os.path.abspath(self.output_dir))
        if self.evaluation_strategy is not None:
            if self.eval_strategy not in ("no", self.evaluation_strategy):
                raise ValueError("eval_strategy and its older spelling evaluation_strategy differ: give one")
            self.eval_strategy = self.evaluation_strategy
        self.report_to = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        self.report_to = [] if self.report_to == ["none"] else self.report_to
        self.eval_steps = self.eval_steps or self.logging_steps
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type == "reduce_lr_on_plateau"
        if self.metric_for_best_model is None and needs_metric:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        for names, possible, requirement in _REQUIREMENTS:
            for name in names.split():
                if not possible(getattr(self, name)):
                    raise ValueError(f"{name} is {getattr(self, name)!r} but must be {requirement}")
        for one, other in (("fp16", "bf16"), ("warmup_steps", "warmup_ratio")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} are both set: choose one")
        best = self.save_strategy == "best"
        if self.eval_strategy == "no" and (best or needs_metric):
            raise ValueError("load_best_model_at_end, save_strategy='best', reduce_lr_on_plateau: set eval_strategy")
        if best and self.metric_for_best_model is None:
            raise ValueError("save_strategy='best' needs metric_for_best_model")
        if self.load_best_model_at_end and not best:
            multiple = self.save_steps / self.eval_steps if self.eval_strategy == "steps" else 1
            if self.save_strategy != self.eval_strategy or not math.isclose(multiple, round(multiple)):
                raise ValueError("load_best_model_at_end: save_strategy must be 'best', or save only after evaluations")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of warm-up in a training of `num_training_steps` steps."""
        return int(self.warmup_steps) or math.ceil(num_training_steps * (self.warmup_steps or self.warmup_ratio))

    @property
    def best_metric_key(self) -> str | None:
        """The key in an evaluation's metrics of `metric_for_best_model`, which may lack its `eval_`."""
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"
