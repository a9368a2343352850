"""Trainer: what a script calls, and what a subclass overrides. The training itself is in `training.py`.

Private methods bear names of the original. Other private work is done by functions, so no subclass replaces it unaware.
"""

import json
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from common.accelerator import utils
from common.accelerator.logging import get_logger
from common.accelerator.state import do_nothing
from common.files import write_atomically
from common.trainer import batches, checkpoint, evaluation, loading, losses, optimization, pretrained, reporting
from common.trainer.progress import Progress
from common.trainer.setup import configure_process, make_accelerator, warn_of_vain_overrides
from common.trainer.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState, as_json
from common.trainer.training import run_training
from common.trainer.training_args import TrainingArguments

logger = get_logger(__name__)  # Scripts import it.


class Trainer:
    """Trains and evaluates any `nn.Module`, on one process or on many, with the interface of `transformers.Trainer`.

    Batches that are dicts are passed as `model(**batch)`, tuples as `model(*batch)`. Unless `compute_loss_func` is
    given or `compute_loss` is overridden, the model returns its loss: under "loss" in a dict or an object, or first in
    a tuple. A process uses one device: several GPUs need several processes.

    Args:
        model: moved to the device in place, or piece by piece by FSDP.
        args: by default `TrainingArguments("tmp_trainer")`.
        data_collator: turns a list of samples into a batch; by default `processing_class` pads them if it is a
            tokenizer, else the values of dicts and tuples are stacked.
        train_dataset: of either of torch's kinds; an iterable one needs `max_steps`.
        eval_dataset: the same, or a dict of several; metrics are then called `eval_<key>_…`.
        processing_class: the tokenizer or the like, saved with the model; callbacks get it too.
        compute_loss_func: (outputs, labels, num_items_in_batch) -> scalar loss; `labels` are the batch's "labels" or
            None, `num_items_in_batch` counts those other than -100 of the whole step, over all ranks and
            micro-batches: return sum / count.
        compute_metrics: (EvalPrediction) -> dict of metrics.
        callbacks: instances or classes, called after the one that says when to log, evaluate and save.
        optimizers: an optimizer and a scheduler, of which either may be None.
        preprocess_logits_for_metrics: (logits, labels) -> the predictions of a batch that an evaluation keeps.
    """

    # For subclasses whose `compute_loss` returns a mean (False), or a loss that is not to be divided (True).
    loss_is_scaled_for_ga: bool | None = None
    # Scripts, and copies of the original's methods, ask for these. They say that something is off, or do nothing.
    deepspeed = None
    is_deepspeed_enabled = False
    label_smoother = None
    optimizer_cls_and_kwargs: Any = None
    hp_search_backend = None
    can_return_loss = False
    is_fsdp_xla_v2_enabled = False
    is_distributed_loading_by_transformers = False
    store_flos = staticmethod(do_nothing)
    _issue_warnings_after_load = staticmethod(do_nothing)
    _memory_tracker = SimpleNamespace(start=do_nothing, stop_and_update_metrics=do_nothing)

    # Of the training under way, or of the last one. `train` makes it anew, as it does `state`, which callbacks see.
    progress: Progress | None = None
    # The micro-batches of the present step. `training_step` divides by their number, and overrides read it.
    current_gradient_accumulation_steps: int = 1
    is_in_train: bool = False

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list], Any] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        *,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[evaluation.EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.args = TrainingArguments("tmp_trainer") if args is None else args
        if self.args.eval_strategy != "no" and eval_dataset is None:
            raise ValueError(f"eval_strategy is {self.args.eval_strategy!r}, but there is no eval_dataset")
        configure_process(self.args)
        self.accelerator = make_accelerator(self.args, model)
        self.is_fsdp_enabled = self.accelerator.state.fsdp_plugin is not None

        # The model. `train` puts DDP, or whatever else the accelerator makes of it, into `model_wrapped`.
        self.model = model
        self.model_wrapped: Any = model
        if not self.accelerator.is_fsdp2:  # a model that is to be shared out may not fit on the device as a whole
            self._move_model_to_device(model, self.accelerator.device)
        config: Any = getattr(model, "config", None)
        if config is not None and not isinstance(config, dict):
            config.use_cache = self.args.use_cache

        # The data. `train` makes the loader.
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.train_dataloader: Any = None
        self.processing_class = processing_class
        default_collator = pretrained.padding_collator(processing_class) or batches.default_data_collator
        self.data_collator = data_collator or default_collator
        label_names = self.args.label_names
        self.label_names = batches.find_labels(model) if label_names is None else label_names
        self._signature_columns: list[str] | None = None

        # The loss. Scripts change the first two after the Trainer is made.
        self.compute_loss_func = compute_loss_func
        self.model_accepts_loss_kwargs = losses.takes_loss_keywords(model)
        self._loss_shifts_labels = losses.shifts_labels(model)
        # Overrides in the style of older tutorials lack the argument.
        takes_count = "num_items_in_batch" in batches.parameters(self.compute_loss)
        self._compute_loss_takes_count = takes_count or losses.takes_any_keyword(self.compute_loss)

        # The metrics. Copies of the original's `evaluation_loop` gather by the first.
        self.gather_function = self.accelerator.gather_for_metrics
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics

        # The optimizer and its schedule. `train` makes those that are missing, and replaces the optimizer by the
        # prepared one. A schedule that a Trainer has created is made anew for each training, and the script's is kept.
        self.optimizer: Any = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        self._created_lr_scheduler = False

        # The position and the switches of the run, and the callbacks, which get them.
        self.state = TrainerState(
            is_local_process_zero=self.accelerator.is_local_main_process,
            is_world_process_zero=self.accelerator.is_main_process,
        )
        self.control = TrainerControl()
        trackers = [reporting.TrackerCallback(self.accelerator)] if self.args.report_to else []
        # The reporter is called last, so that it shows the work of the others.
        reporter = reporting.default_reporter(self.args.disable_tqdm)
        in_order = [DefaultFlowCallback, *trackers, *(callbacks or []), reporter]
        self.callback_handler = CallbackHandler(in_order, model, processing_class, self.optimizer, self.lr_scheduler)
        if self.is_world_process_zero():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        warn_of_vain_overrides(self)
        self.call_event("on_init_end")

    # What a script calls. A subclass overrides `evaluate`, `predict` and `save_model` for metrics and files of its own.

    def train(self, resume_from_checkpoint: str | bool | None = None) -> evaluation.TrainOutput:
        """Train, and return the number of steps, the mean loss over all steps, and the metrics of the run.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest in `args.output_dir` that is not
                damaged. Everything ends up as without the interruption, but a step that a callback stopped halfway has
                other random numbers, and FSDP loses the gradients of a stream's incomplete window.
        """
        folder = checkpoint.find_checkpoint(self.accelerator, self.args.output_dir, resume_from_checkpoint)
        self.is_in_train = True
        output = run_training(self, folder)
        self.is_in_train = False
        return output

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Evaluate; log the metrics and return them on all ranks.

        `<prefix>_loss` is the mean over the samples, of which each counts once, with the mean loss of its batch.

        Args:
            eval_dataset: by default the Trainer's own, or a key of it if that is a dict. Each set of a dict is
                evaluated with the prefix `<prefix>_<key>`.
            ignore_keys: keys of the model's output that hold no predictions.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            metrics: dict[str, Any] = {}
            for name, dataset in data.items():
                # From the name, an override of `get_eval_dataloader` knows which of the sets it is.
                each = name if eval_dataset is None else dataset
                prefix = f"{metric_key_prefix}_{name}"
                metrics |= self.evaluate(eval_dataset=each, ignore_keys=ignore_keys, metric_key_prefix=prefix)
            return metrics

        loader = self.get_eval_dataloader(data)
        # `transformers` passes None here, and not False. An override of `evaluation_loop` may ask for it.
        loss_only = True if self.compute_metrics is None else None
        options = {"description": "Evaluation", "prediction_loss_only": loss_only, "ignore_keys": ignore_keys}
        output = evaluation.run(self, loader, metric_key_prefix, **options)
        self.log(output.metrics)
        self.call_event("on_evaluate", metrics=output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> evaluation.PredictionOutput:
        """The model's predictions for every sample of `test_dataset`, in its order, on all ranks; not logged."""
        loader = self.get_test_dataloader(test_dataset)
        output = evaluation.run(self, loader, metric_key_prefix, description="Prediction", ignore_keys=ignore_keys)
        self.call_event("on_predict", metrics=output.metrics)
        return evaluation.PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model into `output_dir`, by default `args.output_dir`, and the tokenizer, on the main process.

        The weights are in `model.safetensors`; a model of `transformers` is saved as `from_pretrained` reads it. A
        script may call this on the main process alone, except under FSDP, where all ranks call it. `_internal_call` is
        True in a checkpoint, for overrides.
        """
        folder = output_dir or self.args.output_dir
        if self.is_fsdp_enabled:
            self._save(folder, state_dict=self.accelerator.get_state_dict(self.model))
        else:
            self._save(folder)

    def save_state(self) -> None:
        """Write `trainer_state.json` into `args.output_dir`, in the main process."""
        if self.is_world_process_zero():
            self.state.save_to_json(f"{self.args.output_dir}/{checkpoint.TRAINER_STATE_NAME}")

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics in lines, in the main process; `split` names them: "train", "eval", "test"."""
        if self.is_world_process_zero():
            print(reporting.metrics_lines(split, metrics), flush=True)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json` and, if `combined`, add them to `all_results.json`."""
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        contents = {f"{split}_results.json": metrics}
        if combined:
            all_results = folder / "all_results.json"
            before = json.loads(all_results.read_text(encoding="utf-8")) if all_results.exists() else {}
            contents[all_results.name] = before | metrics
        for name, content in contents.items():
            write_atomically(folder / name, json.dumps(content, indent=4, sort_keys=True, default=as_json))

    def create_model_card(self, **description: Any) -> None:
        """Write `README.md` into `args.output_dir`, in the main process: `description` (tags, …) and the results."""
        if self.is_world_process_zero():
            write_atomically(Path(self.args.output_dir, "README.md"), reporting.model_card(self.state, description))

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a new instance of a callback class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first of a class; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first of a class."""
        self.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """True in the main process of all machines."""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """True in the main process of its machine."""
        return self.accelerator.is_local_main_process

    def end(self) -> None:
        """Finish the trackers and leave the process group: the last call in a script."""
        self.accelerator.end_training()

    # The work on a batch. A subclass overrides `compute_loss` for its own loss, and the others for its own steps.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | None = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its detached share of the step's loss, a scalar."""
        model.train()
        optimization.set_mode(self.optimizer, "train")
        inputs = self._prepare_inputs(inputs)
        loss = losses.call_compute_loss(self, model, inputs, num_items_in_batch)
        empty_cache_steps = self.args.torch_empty_cache_steps
        if empty_cache_steps is not None and self.state.global_step % empty_cache_steps == 0:
            utils.clear_device_cache()
        loss = loss / losses.loss_divisor(self, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss (mean over the batch), logits and labels of one batch, each None where there is none."""
        inputs = self._prepare_inputs(inputs)
        labels = batches.get_labels(inputs, self.label_names)
        has_loss = labels is not None
        loss = None
        with torch.no_grad():
            if has_loss:
                # No parameter, because overrides have those of the original. If a script calls this, there may be none.
                loader = self.callback_handler.eval_dataloader
                is_collective = loader is None or (loading.is_prepared(loader) and loader.short_step is None)
                num_items = losses.count_items(self, [inputs], is_collective)
                loss, outputs = losses.call_compute_loss(self, model, inputs, num_items, return_outputs=True)
                loss = loss.detach().mean()
            else:
                with self.compute_loss_context_manager():
                    outputs = batches.call_model(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        inside = batches.model_inside(self.model)
        if ignore_keys is None and hasattr(inside, "config"):
            ignore_keys = getattr(inside.config, "keys_to_ignore_at_inference", ["cache"])
        return loss, batches.get_logits(outputs, ignore_keys or [], holds_loss=has_loss), labels

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        """The scalar loss of a batch, or (loss, outputs). `losses.loss_divisor` says what an override returns."""
        if self.compute_loss_func is None:
            outputs = losses.forward(self, model, inputs, num_items_in_batch)
            loss = losses.get_loss(outputs)
        else:
            inputs, labels = batches.split_labels(inputs)
            outputs = losses.forward(self, model, inputs, num_items_in_batch)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        ranks = losses.loss_factor(self, num_items_in_batch)
        if ranks > 1:  # An override may expect what `compute_loss_func` has returned, whatever that is.
            loss = loss * ranks
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager:
        """The context of each forward, for overrides; the accelerator has its own."""
        return ExitStack()  # as in the original: an override may enter more into it

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """A batch, or data of the script's own, on the device."""
        device = self.accelerator.device
        if self.accelerator.num_processes > 1 and device.type == "cpu":
            # `transformers` copies it too, to the device "cpu:0". A copy begins at an aligned address; a product over a
            # part of a larger batch, which begins anywhere, may be rounded in another way.
            return utils.recursively_apply(torch.clone, data)
        return utils.send_to_device(data, device)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Callable, Any]:
        return nullcontext, inputs  # no sequence is split

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        """The labels of all ranks in these batches, see `losses.count_items`; None if no loss depends on it."""
        return losses.count_items(self, batch_samples)

    # The data. A subclass overrides these for loaders, an order or columns of its own.

    def get_train_dataloader(self) -> DataLoader:
        """The prepared loader of the training set, shuffled; an override may return one that is not prepared.

        Any object that can be iterated over will do: a resumed run reads it again up to the batch where it stopped. On
        several processes, the batches of a `DataLoader` are dealt out to the ranks, unless its sampler does that.
        """
        if self.train_dataset is None:
            raise ValueError("a training needs a train_dataset")
        sampler = self._get_train_sampler
        return self._get_dataloader(self.train_dataset, "Training", self._train_batch_size, sampler, is_training=True)

    def get_eval_dataloader(self, eval_dataset: Dataset | str | None = None) -> DataLoader:
        """The loader of this rank's share of an evaluation set, in order: a dataset, or the key of one of several.

        An override may return a plain loader of the whole set: its batches are dealt out to the ranks before use.
        Any other object that can be iterated over is read as it is, by every rank.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("an evaluation needs an eval_dataset")
        return self._get_dataloader(dataset, "Evaluation", self.args.eval_batch_size, self._get_eval_sampler)

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """The loader of this rank's share of `test_dataset`, in order."""
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, self._get_eval_sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        """A prepared loader, without columns that the model does not take; `dataloader_key` is for overrides."""
        args = self.args
        collator = self.data_collator
        if batches.is_table(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
        settings: dict[str, Any] = {}
        if not isinstance(dataset, IterableDataset):  # a stream has an order and an end of its own
            settings["sampler"] = None if sampler_fn is None else sampler_fn(dataset)
            settings["drop_last"] = is_training and args.dataloader_drop_last
            if is_training:
                seeding = {"num_workers": args.dataloader_num_workers, "rank": self.accelerator.process_index}
                settings["worker_init_fn"] = partial(loading.seed_worker, **seeding)
        loader = DataLoader(
            dataset,
            batch_size,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory and self.accelerator.device.type != "cpu",
            **settings,
        )
        return self.accelerator.prepare_data_loader(loader)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        """The sampler of the training set, a random one; None, for the order that it has, if it has no length."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return RandomSampler(dataset) if isinstance(dataset, Sized) else None

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler | None:
        return None

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """A data set of `datasets` without these columns, unless the arguments keep them."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        unused = [name for name in dataset.column_names if name not in self._signature_columns]
        if len(unused) == len(dataset.column_names):
            raise batches.no_common_column(dataset.column_names, self._signature_columns)
        return dataset.remove_columns(unused)

    def _get_collator_with_removed_columns(self, data_collator: Callable, description: str | None = None) -> Callable:
        """`data_collator`, behind a filter for columns that the model does not take, unless the arguments keep them."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        columns = set(self._signature_columns)
        return partial(batches.collate_columns, collator=data_collator, columns=columns)

    def _set_signature_columns_if_needed(self) -> None:
        """Note the columns that are kept, unless they are noted. An override may note others."""
        if self._signature_columns is None:
            taken = batches.parameters(batches.model_inside(self.model).forward)
            self._signature_columns = [*taken, *self.label_names, batches.LABEL]

    # The model on its device, the optimizer, its schedule. A subclass overrides these for others than `args` can name.

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move a model in place. Scripts call it for a second one, such as a teacher."""
        model.to(device)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make `self.optimizer` and `self.lr_scheduler` unless they are there; a subclass may make others."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make `self.optimizer` unless there is one. Biases and normalisation layers get no weight decay."""
        if self.optimizer is None:
            model = self.model if model is None else model
            decay_names = set(self.get_decay_parameter_names(model))
            groups = optimization.parameter_groups(model, decay_names, self.args.weight_decay)
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            optimizer_class, arguments = chosen
            self.optimizer = optimizer_class(groups, **arguments)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[type, dict]:
        """The class of the optimizer that `args` name, and its arguments but the parameters. `model` has no effect."""
        class_name = optimization.OPTIMIZERS[args.optim]
        arguments: dict[str, Any] = {"lr": args.learning_rate}
        if class_name == "AdamW":
            arguments |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        if args.optim == "adamw_torch_fused":
            arguments["fused"] = True
        return getattr(torch.optim, class_name), arguments

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the parameters that get weight decay, in `model.named_parameters`."""
        return optimization.decay_parameter_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Make `self.lr_scheduler` unless there is one."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            self.lr_scheduler = optimization.make_scheduler(optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        if optimization.follows_metric(self.lr_scheduler):
            return self.optimizer.param_groups[0]["lr"]
        return self.lr_scheduler.get_last_lr()[0]

    # Evaluations, logs and checkpoints. A subclass overrides these for further metrics, values and files.

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> evaluation.EvalLoopOutput:
        """One pass over a loader, for `evaluate` and `predict`: the predictions of all ranks, and the metrics.

        `description` is "Evaluation" or "Prediction", for overrides; `prediction_loss_only` by default as `args` say.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        if dataloader is not self.train_dataloader:
            self.accelerator.forget_loader(dataloader)  # checkpoints hold the position in the training set alone
        self.callback_handler.eval_dataloader = dataloader
        model = evaluation.set_up_model(self)
        results = evaluation.predict_batches(self, model, dataloader, prediction_loss_only, ignore_keys)
        gathered = evaluation.gather_batches(evaluation.to_host(results, self.accelerator.device))
        return evaluation.summarize(gathered, self.compute_metrics, self.args, f"{metric_key_prefix}_")

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add `logs`, epoch and step to the log history, and tell the callbacks; `start_time` is for overrides."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Tell the callbacks that listen; they may steer the run through `self.control`."""
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save everything that the run needs to go on; `model` and `trial` are for overrides. All ranks call this."""
        methods = tuple(getattr(method, "__func__", None) for method in (self.save_model, self._save))
        # Functions that a subclass or a script has put in their places write files of their own.
        is_replaced = methods != self._own_saves
        checkpoint.save(self, self._get_output_dir(trial=trial), calls_save_model=is_replaced)

    def _get_output_dir(self, trial: Any) -> str:
        """The folder of the checkpoints; `trial` is for overrides."""
        return self.args.output_dir

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write as `save_model` does, which calls it on all ranks, with the weights of `state_dict` if it is given."""
        folder = output_dir or self.args.output_dir
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        weights = self.accelerator.get_state_dict(model) if state_dict is None else state_dict
        if not self.is_world_process_zero():
            return
        if not pretrained.is_pretrained(model):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.accelerator.save(weights, f"{folder}/model.safetensors", safe_serialization=True)
        pretrained.save(self, model, folder, weights)

    # As they stand here, because a script may replace methods of this class too, and not only of its own.
    _own_saves = (save_model, _save)

    def _load_best_model(self) -> None:
        """Load the weights of `state.best_model_checkpoint`. All ranks call this."""
        checkpoint.load_best_model(self.accelerator, self.model, str(self.state.best_model_checkpoint))

    # Nothing here calls these, but scripts and copies of the original's methods do.

    @property
    def _train_batch_size(self) -> int:
        return self.args.train_batch_size

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        return nullcontext()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def num_examples(self, dataloader: DataLoader) -> int:
        """The samples of a loader, or an estimate where its data set does not say it."""
        num_samples = loading.length_of(getattr(dataloader, "dataset", None))
        return len(dataloader) * self.args.per_device_train_batch_size if num_samples is None else num_samples

    def get_num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
