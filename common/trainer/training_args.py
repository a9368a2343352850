"""TrainingArguments: every setting of a run, checked when it is made."""

import json
import logging
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.accelerator import PartialState
from common.accelerator.tracking import get_available_trackers
from common.accelerator.utils import FullyShardedDataParallelPlugin
from common.launch import LAUNCHER_PRECISION
from common.trainer.optimization import OPTIMIZERS, SCHEDULES


@dataclass
class AcceleratorConfig:
    """Settings of the accelerator for loading data, as `transformers` has it.

    Args:
        split_batches: a loader's batch is the batch of all processes and is split among them. By default each process
            has a batch of that size.
        dispatch_batches: the main process reads the data and sends the others their parts. By default it does so for
            iterable datasets only.
        use_seedable_sampler: epoch e is shuffled by a generator seeded with `data_seed` + e.
        non_blocking: copy batches to the GPU without waiting for the copy; the batches must be pinned.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    use_seedable_sampler: bool = True
    non_blocking: bool = False


class ParallelMode(Enum):
    """The ways of running that scripts ask `TrainingArguments.parallel_mode` for."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"


class Choice(str):
    """One of several texts. Most are members of an enumeration in `transformers`, so scripts also read a `value`."""

    @property
    def value(self) -> str:
        return str(self)


def resolve_steps(setting: float, num_training_steps: int) -> int:
    """A setting in steps; below 1 it is a share of all steps."""
    return int(setting) if setting >= 1 else math.ceil(num_training_steps * setting)


def is_count(value: Any) -> bool:
    return value >= 1 and float(value).is_integer()


def is_steps(value: Any) -> bool:
    return 0 < value < 1 or is_count(value)


# Lets `HfArgumentParser` take a flag without a value.
FLAG = {"nargs": "?", "const": True}


@dataclass
class TrainingArguments:
    """The settings of one run, with the names and defaults of `transformers.TrainingArguments`.

    Making one starts no process group and no device, so that a notebook can hand it to launched processes; asking it
    for the device or the rank does start them. Steps are optimizer steps, batch sizes samples per device and
    micro-batch: a step sees per_device_train_batch_size · gradient_accumulation_steps · processes samples. With
    `split_batches` the size is that of all processes together. Settings that are not listed mean what their names say.

    Args:
        output_dir: where checkpoints go, as `checkpoint-<step>/`.
        max_steps: ends training after so many steps and overrides `num_train_epochs`; required for a dataset
            without a length. -1: not set.
        optim, lr_scheduler_type: one of `OPTIMIZERS`, and one of `SCHEDULES`.
        lr_scheduler_kwargs: further options of the schedule, for example {"num_cycles": 1.5}.
        max_grad_norm: clip the total norm of the gradients to this; 0 or less leaves them alone.
        logging_strategy, eval_strategy, save_strategy: "no", "steps" or "epoch"; `save_strategy` also "best": after
            each evaluation that improves `metric_for_best_model`.
        warmup_steps, logging_steps, eval_steps, save_steps: below 1, the share of all steps. With
            `eval_strategy="steps"`, `eval_steps` defaults to `logging_steps`.
        eval_delay: steps, or with `eval_strategy="epoch"` epochs, before the first evaluation.
        prediction_loss_only: gather no predictions, so that `compute_metrics` is not called.
        label_names: keys of a batch that hold labels; by default `forward`'s parameters with "label" in their name.
        logging_nan_inf_filter: where the loss of a micro-batch is not finite, log the mean of those since the last log
            in its place; leave such losses out of an evaluation's loss too.
        log_level: of the first process of each machine; the others log warnings. "passive" leaves all as they are.
        report_to: "none", "all" that are installed, or names of trackers that the accelerator knows.
        run_name: the run's name for the trackers; by default the last part of `output_dir`.
        disable_tqdm: print plain lines in place of a progress bar; by default where stderr is no terminal.
        save_only_model: leave the optimizer and its schedule out of checkpoints. No training can go on from them.
        save_total_limit: keep so many checkpoints; the newest and the best are never deleted.
        metric_for_best_model: a key of the evaluation's metrics, with or without `eval_`; "loss" when one is needed.
        greater_is_better: by default True unless the metric's name ends in "loss".
        seed: of everything random in training; the same on all ranks.
        data_seed: of the order: epoch e visits `torch.randperm(n)` seeded with data_seed + e. By default it is
            `torch.initial_seed()` when training begins, which is `seed` unless the script has seeded again.
        remove_unused_columns: from samples that are dicts, drop keys that are neither parameters of the model's
            `forward` nor labels.
        dataloader_drop_last: drop each epoch's last batch if it is smaller. Evaluation never drops a sample.
        bf16_full_eval, fp16_full_eval: put the model into it for evaluations outside of `train`; it stays so.
        tf32: multiply float32 matrices on GPUs in TensorFloat-32 (True) or not (False); by default as torch is set.
        activation_checkpointing, gradient_checkpointing: by either name, let the model compute activations again in
            the backward pass, by its method `activation_checkpointing_enable` or `gradient_checkpointing_enable`.
        fsdp: share the model out to the processes: True, or words of "full_shard", "shard_grad_op" and "auto_wrap".
        fsdp_config: settings of FullyShardedDataParallelPlugin; transformer_based_wrap by default.
        ddp_find_unused_parameters: let DDP look for parameters that a step does not use, which takes time in every
            step; on by default, unless a model of `transformers` checkpoints activations. Another network that does so
            in the reentrant way needs False.
        ddp_timeout: seconds that a collective waits for a missing rank before it raises.
    """

    output_dir: str = "trainer_output"

    # The samples of a step, and the number of steps.
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1

    # The optimizer and its learning rate.
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0

    # Evaluations.
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    prediction_loss_only: bool = False
    label_names: list[str] | None = None

    # Logs, and who shows them.
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = True
    log_level: str = "passive"
    # None comes first, because `HfArgumentParser` takes the type of a union from its other members.
    report_to: None | str | list[str] = "none"  # noqa: RUF036
    run_name: str | None = None
    disable_tqdm: bool | None = None

    # Checkpoints, and which of them is the best.
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None

    # Random numbers, and the loading of data.
    seed: int = 42
    data_seed: int | None = None
    remove_unused_columns: bool = True
    dataloader_num_workers: int = 0
    dataloader_drop_last: bool = False
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_pin_memory: bool = True
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = None

    # The computation on a device: its precision, compiler and memory.
    use_cpu: bool = False
    bf16: bool = False
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    torch_compile: bool = False
    torch_empty_cache_steps: int | None = None
    use_cache: bool = False
    activation_checkpointing: bool | None = field(default=None, metadata=FLAG)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    gradient_checkpointing: bool | None = field(default=None, metadata=FLAG)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None

    # The work of several processes.
    fsdp: str | None = field(default=None, metadata=FLAG)
    fsdp_config: dict[str, Any] | str | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_timeout: int = 1800

    # Only for scripts that ask. The Trainer looks at none of these, and sets `do_eval` if there is an `eval_strategy`.
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    resume_from_checkpoint: str | None = None
    local_rank: int = -1
    eval_accumulation_steps: int | None = None  # Results go to the CPU after each batch.
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_token: str | None = field(default=None, repr=False)
    hub_private_repo: bool | None = None

    # This Trainer does none of these. A script may ask whether they are on; to switch one on is an error.
    deepspeed: dict[str, Any] | str | None = None
    debug: str | list[str] = ""
    label_smoothing_factor: float = 0.0
    eval_do_concat_batches: bool = True
    average_tokens_across_devices: bool = True
    use_liger_kernel: bool = False
    push_to_hub: bool = False

    # No settings, but copies of the original's methods ask for these.
    batch_eval_metrics = False
    dataloader_in_order = True
    dataloader_multiprocessing_context = None
    include_for_metrics = ()
    include_num_input_tokens_seen = "no"
    optim_args = None
    train_sampling_strategy = "random"

    def __post_init__(self) -> None:
        self._read_json()
        self._complete_output()
        self._complete_activation_checkpointing()
        self._check_not_offered()
        self._check_choices()
        self._check_numbers()
        self._complete_precision()
        self._complete_evaluation()
        self.make_fsdp_plugin()  # refuses settings that it does not know

    def _read_json(self) -> None:
        """Read the settings that a command line gives as JSON, or as the name of a file with it."""
        dicts = ["accelerator_config", "lr_scheduler_kwargs", "fsdp_config"]
        dicts += ["activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"]
        for name in dicts:
            value = getattr(self, name)
            if isinstance(value, str):
                text = value if value.startswith("{") else Path(value).read_text(encoding="utf-8")
                setattr(self, name, json.loads(text))
        if not isinstance(self.accelerator_config, AcceleratorConfig):
            settings: Any = self.accelerator_config or {}
            self.accelerator_config = AcceleratorConfig(**settings)

    def _complete_output(self) -> None:
        """Give the folder of the run, its trackers and `debug` the types that scripts expect."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self.output_dir = os.path.expanduser(self.output_dir)
        if self.report_to in ("all", ["all"]):
            self.report_to = get_available_trackers()
        elif self.report_to in (None, "none", ["none"]):
            self.report_to = []
        elif isinstance(self.report_to, str):
            self.report_to = [self.report_to]
        self.debug = self.debug or []

    def _complete_activation_checkpointing(self) -> None:
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        self.gradient_checkpointing = self.activation_checkpointing
        self.gradient_checkpointing_kwargs = self.activation_checkpointing_kwargs

    def _check_not_offered(self) -> None:
        only_values = {
            "push_to_hub": False,
            "deepspeed": None,
            "debug": [],
            "label_smoothing_factor": 0.0,
            "eval_do_concat_batches": True,
            "average_tokens_across_devices": True,
            "use_liger_kernel": False,
        }
        for name, value in only_values.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} must be {value!r}: this Trainer offers nothing else")

    def _check_choices(self) -> None:
        choices_of = {
            "optim": OPTIMIZERS,
            "lr_scheduler_type": SCHEDULES,
            "logging_strategy": ("no", "steps", "epoch"),
            "eval_strategy": ("no", "steps", "epoch"),
            "save_strategy": ("no", "steps", "epoch", "best"),
            "log_level": ("passive", "debug", "info", "warning", "error", "critical"),
        }
        for name, choices in choices_of.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r} but must be one of {', '.join(choices)}")
            setattr(self, name, Choice(getattr(value, "value", value)))

    def _check_numbers(self) -> None:
        counts = ["per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"]
        counts += ["save_total_limit", "torch_empty_cache_steps"]
        rates = ["learning_rate", "weight_decay", "eval_delay"]
        if self.max_steps == -1:  # else it overrides the epochs
            rates.append("num_train_epochs")
        check = self._check_each
        check(counts, is_count, "whole, above 0")
        check(["logging_steps", "save_steps"], is_steps, "whole and above 0, or a share below 1")
        check(["eval_steps", "warmup_steps"], lambda value: value == 0 or is_steps(value), "whole, or a share below 1")
        check(rates, lambda value: value >= 0, "0 or more")
        check(["max_grad_norm"], lambda value: not math.isnan(value), "a number")
        check(["max_steps"], lambda value: value == -1 or is_count(value), "whole and above 0, or -1 for no limit")
        self.gradient_accumulation_steps = int(self.gradient_accumulation_steps)  # it may be 2.0

    def _check_each(self, names: list[str], is_allowed: Callable[[Any], bool], description: str) -> None:
        for name in names:
            value = getattr(self, name)
            try:
                is_right = value is None or is_allowed(value)
            except (TypeError, ValueError):  # it is a text
                raise ValueError(f"{name} is {value!r} but must be a number: {description}") from None
            if not is_right:
                raise ValueError(f"{name} is {value!r} but must be {description}")

    def _complete_precision(self) -> None:
        """Set `mixed_precision`, which is no field, as in `transformers`: by default as the launcher says."""
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both set: choose one")
        if self.fp16_full_eval and self.bf16_full_eval:
            raise ValueError("fp16_full_eval and bf16_full_eval are both set: choose one")
        self.mixed_precision = os.environ.get(LAUNCHER_PRECISION, "no")
        if self.fp16:
            self.mixed_precision = "fp16"
        elif self.bf16:
            self.mixed_precision = "bf16"

    def _complete_evaluation(self) -> None:
        """Complete the settings of evaluations, and refuse those that exclude each other."""
        if self.eval_strategy != "no":
            self.do_eval = True
        if self.eval_strategy == "steps":
            self.eval_steps = self.eval_steps or self.logging_steps
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type == "reduce_lr_on_plateau"
        saves_best = self.save_strategy == "best"
        if self.eval_strategy == "no" and (saves_best or needs_metric):
            raise ValueError("load_best_model_at_end, save_strategy='best', reduce_lr_on_plateau: set eval_strategy")
        if self.load_best_model_at_end and self.save_strategy not in ("best", self.eval_strategy):
            raise ValueError("load_best_model_at_end: save_strategy must be 'best', or that of the evaluations")
        if self.metric_for_best_model is None and needs_metric:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is None and saves_best:
            raise ValueError("save_strategy='best' needs metric_for_best_model")
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def make_fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The settings by which the model is shared out; None if it is not, or if the launcher says how."""
        if not self.fsdp:
            return None
        settings: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        reshards_by_word = {"full_shard": True, "shard_grad_op": False}
        words: Any = [] if self.fsdp is True else self.fsdp
        if isinstance(words, str):
            words = words.split()
        for word in words:
            if word in reshards_by_word:
                settings["reshard_after_forward"] = reshards_by_word[word]
            elif word != "auto_wrap":
                known = "full_shard, shard_grad_op, auto_wrap"
                raise ValueError(f"fsdp is {self.fsdp!r} but must be True, or of the words {known}")
        # The plugin has other names for these.
        names = {"version": "fsdp_version", "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
        config: Any = self.fsdp_config or {}
        for key, value in config.items():
            name = key.removeprefix("fsdp_")
            settings[names.get(name, name)] = value
        return FullyShardedDataParallelPlugin(**settings)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return resolve_steps(self.warmup_steps, num_training_steps)

    @property
    def world_size(self) -> int:
        """Processes of the run: those of the group or, before there is one, those of the launcher."""
        if dist.is_initialized():
            return dist.get_world_size()
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def distributed_state(self) -> PartialState:
        """This process. Asking for it joins the process group, which making the arguments does not."""
        return PartialState(cpu=self.use_cpu, timeout=self.ddp_timeout_delta)

    @property
    def device(self) -> torch.device:
        return self.distributed_state.device

    @property
    def n_gpu(self) -> int:
        """The GPUs of this process: one, or none."""
        return int(self.device.type != "cpu")

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """Samples in a micro-batch of this process or, with `split_batches`, of all processes together."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in a batch of an evaluation, counted in the same way."""
        return self.per_device_eval_batch_size

    @property
    def process_index(self) -> int:
        return self.distributed_state.process_index

    @property
    def local_process_index(self) -> int:
        return self.distributed_state.local_process_index

    @property
    def should_log(self) -> bool:
        """True in the first process of each machine."""
        return self.local_process_index == 0

    @property
    def should_save(self) -> bool:
        """True in the process that writes files: the first one of all."""
        return self.process_index == 0

    def get_process_log_level(self) -> int:
        """The level for a script's loggers. A passive `log_level` is that of the logger of `transformers`."""
        if not self.should_log:
            return logging.WARNING
        if self.log_level != "passive":
            return getattr(logging, self.log_level.upper())
        return logging.getLogger("transformers").getEffectiveLevel()

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager:
        """The block runs in the main process, of each machine if `local`, before it runs in the others."""
        process = self.distributed_state
        return process.local_main_process_first() if local else process.main_process_first()

    def to_dict(self) -> dict[str, Any]:
        """All settings, each Choice as plain text, without tokens."""
        settings = asdict(self)
        for name, value in settings.items():
            if isinstance(value, Choice):
                settings[name] = value.value
            elif name.endswith("_token"):
                settings[name] = f"<{name.upper()}>"
        return settings

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @property
    def ddp_timeout_delta(self) -> timedelta:
        return timedelta(seconds=self.ddp_timeout)

    @property
    def best_metric_key(self) -> str | None:
        """The key in an evaluation's metrics of `metric_for_best_model`, which may lack its `eval_`."""
        name = self.metric_for_best_model
        if name is None or name.startswith("eval_"):
            return name
        return f"eval_{name}"
