"""Trainer: the training loop that is otherwise written by hand, with logging, evaluation and checkpoints in it.

Read it from the top: what a Trainer holds, `train`, one step of it, what follows a step, checkpoints, evaluation,
loaders, and the small parts.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from common.accelerator import Accelerator, checkpointing, utils
from common.accelerator.state import AcceleratorState
from common.trainer import batches, checkpoint, evaluation, optimization, reporting
from common.trainer.arguments import TrainingArguments
from common.trainer.callbacks import CallbackHandler, DefaultFlowCallback, Progress, TrainerControl, TrainerState


class Trainer:
    """Trains and evaluates any `nn.Module`, on one process or on many, with the interface of `transformers.Trainer`.

    Batches that are dicts are passed as `model(**batch)`, tuples as `model(*batch)`. Unless `compute_loss_func` is
    given or `compute_loss` is overridden, the model returns its loss: under "loss" in a dict or an object, or first in
    a tuple. A process uses one device: several GPUs need several processes.

    Args:
        model: to be trained, moved to the device in place; or else
        model_init: called by `Trainer` and by every `train` for a new model, the seed set before.
        args: by default `TrainingArguments()`.
        data_collator: turns a list of samples into a batch; by default stacks the values of dicts and tuples.
        train_dataset: of either of torch's kinds; an iterable one needs `max_steps`.
        eval_dataset: the same, or a dict of several; metrics are then called `eval_<key>_…`.
        compute_loss_func: (outputs, labels, num_items_in_batch) -> scalar loss; `num_items_in_batch` counts the
            labels other than -100 of the whole step, over all ranks and micro-batches: return sum / count.
        compute_metrics: (EvalPrediction) -> dict of numbers.
        callbacks: instances or classes, called after the standard ones.
        optimizers: an optimizer and a scheduler, of which either may be None.
        preprocess_logits_for_metrics: (logits, labels) -> what to keep of a batch's logits.

    Raises:
        ValueError: for arguments that cannot work together.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list], Any] | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        *,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, LRScheduler | None] = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> None:
        self.args = args = args or TrainingArguments()
        if (model is None) == (model_init is None):
            raise ValueError("Trainer needs either a model or a model_init")
        if model_init is not None and optimizers != (None, None):
            raise ValueError("model_init makes a new model for each training, which optimizers cannot know: drop one")
        if args.eval_strategy != "no" and eval_dataset is None:
            raise ValueError(f"eval_strategy is {str(args.eval_strategy)!r}, but there is no eval_dataset")
        ddp = {"find_unused_parameters": bool(args.ddp_find_unused_parameters)}
        timeout = timedelta(seconds=args.ddp_timeout)
        # In one notebook after another Trainer: let this one choose its own precision.
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            cpu=args.use_cpu,
            mixed_precision="fp16" if args.fp16 else "bf16" if args.bf16 else None,
            # The micro-batches of a step are weighted here, by their samples.
            gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=1),
            dataloader_config=utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.data_seed),
            # Else the scheduler would be stepped once for every process.
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[utils.DistributedDataParallelKwargs(**ddp), utils.InitProcessGroupKwargs(timeout=timeout)],
            dynamo_backend="inductor" if args.torch_compile else None,
            log_with=args.report_to or None,
            project_dir=args.output_dir,
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator = data_collator or batches.default_data_collator
        self.model_init, self.compute_loss_func = model_init, compute_loss_func
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._own_scheduler = self.lr_scheduler is None
        utils.set_seed(args.seed)
        self.model = self.model_wrapped = (model_init() if model is None else model).to(self.accelerator.device)
        named_so = [name for name in batches.parameters(self.model.forward) if "label" in name]
        self.label_names = args.label_names or named_so or ["labels"]
        # Overrides in the style of older tutorials do without this argument.
        self._loss_takes_count = "num_items_in_batch" in batches.parameters(self.compute_loss)
        trackers = [reporting.TrackerCallback(self.accelerator)] if args.report_to else []
        standard = [DefaultFlowCallback, reporting.default_reporter(args.disable_tqdm), *trackers]
        self.callback_handler = CallbackHandler([*standard, *(callbacks or [])])
        self.state, self.control, self.progress = self._new_state(), TrainerControl(), Progress()
        self.train_dataloader = self.eval_dataloader = None
        self.call_event("on_init_end")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> evaluation.TrainOutput:
        """Train, and return the number of steps, the mean loss over all samples, and the metrics of the run.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest in `args.output_dir` that is not
                damaged; by default what `args` say. Weights, log history and everything else end up as without the
                interruption.

        Raises:
            ValueError: if there is nothing to train on.
            CheckpointError: a ValueError too, naming what is damaged, if there is no whole checkpoint to resume from;
                on the other processes a RuntimeError that quotes it.
        """
        args, accelerator = self.args, self.accelerator
        resume_from = checkpoint.find_checkpoint(accelerator, args, resume_from_checkpoint)
        if self.model_init is not None:
            utils.set_seed(args.seed)
            self.model = self.model_wrapped = self.model_init().to(accelerator.device)
            self.optimizer = None
        # Sample order has a seed of its own; what ranks draw for themselves, like dropout, must differ.
        utils.set_seed(args.seed, device_specific=True)
        accelerator.free_memory()
        self.train_dataloader = loader = accelerator.prepare(self.get_train_dataloader())
        batches_per_epoch, num_epochs, max_steps = self._plan(loader)
        self.state, self.control, self.progress = self._new_state(max_steps, num_epochs), TrainerControl(), Progress()
        if self._own_scheduler:
            self.lr_scheduler = None
        self.create_optimizer()
        self.create_scheduler(max_steps)
        self._plateau = isinstance(self.lr_scheduler, ReduceLROnPlateau)
        prepared = accelerator.prepare(self.model_wrapped, self.optimizer, self.lr_scheduler)
        self.model_wrapped, self.optimizer, self.lr_scheduler = prepared
        if resume_from:
            self._load_checkpoint(resume_from)
        state, progress = self.state, self.progress
        dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self._loss_sum, self._num_samples = torch.zeros((), dtype=dtype, device=accelerator.device), 0
        steps_before, samples_before, start_time = state.global_step, progress.samples, time.time()

        self.model_wrapped.train()
        self.call_event("on_train_begin")
        if self.control.should_training_stop and progress.epoch_ended:  # a run that was over before
            num_epochs = 0
        for epoch in range(progress.epoch, num_epochs):
            loader.set_epoch(epoch)
            self.call_event("on_epoch_begin")
            progress.epoch, progress.epoch_ended = epoch, False
            for window in self._windows(loader):
                self._train_on(window)
                progress.batches += len(window)
                state.global_step += 1
                state.epoch = epoch + progress.batches / batches_per_epoch
                self.call_event("on_step_end")
                self._log_evaluate_save()
            if progress.batches == 0 and not self._should_stop():
                raise ValueError(f"epoch {epoch} had no batch to train on after {state.global_step} steps")
            self.call_event("on_epoch_end")
            progress.epoch_ended = True
            # A run that is stopped within an epoch can go on there.
            if progress.batches == batches_per_epoch or self.control.should_epoch_stop or not self._should_stop():
                progress.epoch, progress.batches, self.control.should_epoch_stop = epoch + 1, 0, False
            self._log_evaluate_save()
            if self.control.should_training_stop:
                break

        self._read_device()
        num_steps, num_samples = state.global_step - steps_before, progress.samples - samples_before
        train_loss = progress.loss / max(1, progress.samples)
        metrics = {f"train_{n}": v for n, v in evaluation.speed_metrics(start_time, num_samples, num_steps).items()}
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss}
        self.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            checkpointing.verify(Path(state.best_model_checkpoint))
            load_model(self.model, f"{state.best_model_checkpoint}/model.safetensors")
        self.call_event("on_train_end")
        return evaluation.TrainOutput(state.global_step, train_loss, metrics)

    def _plan(self, loader: DataLoader) -> tuple[int, int, int]:
        """Batches per epoch on each rank, epochs begun, and steps."""
        args, accumulation = self.args, self.args.gradient_accumulation_steps
        if isinstance(loader.dataset, IterableDataset):
            if args.max_steps < 0:
                raise ValueError("how long an epoch of an iterable train_dataset is cannot be known: set max_steps")
            return args.max_steps * accumulation, args.max_steps, args.max_steps
        steps_per_epoch = len(loader) // accumulation if args.dataloader_drop_last else -(-len(loader) // accumulation)
        if steps_per_epoch == 0:
            raise ValueError(f"the training set's {len(loader.dataset)} samples do not fill one optimizer step")
        batches_per_epoch = min(len(loader), steps_per_epoch * accumulation)
        max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
        return batches_per_epoch, math.ceil(max_steps / steps_per_epoch), max_steps

    def _windows(self, loader: DataLoader) -> Iterator[list]:
        """The micro-batches of each optimizer step: all at once, for each weighs as much as its share of samples."""
        accumulation, micro_batches = self.args.gradient_accumulation_steps, iter(loader)
        least = accumulation if self.args.dataloader_drop_last else 1
        while not self._should_stop() and len(window := list(islice(micro_batches, accumulation))) >= least:
            yield window

    def _should_stop(self) -> bool:
        return self.control.should_epoch_stop or self.control.should_training_stop

    def _train_on(self, window: list) -> None:
        """One optimizer step. Nothing in it waits for the device."""
        self.call_event("on_step_begin")
        # Not after the step, so that the norm of these gradients can still be logged.
        self.optimizer.zero_grad()
        counts = [utils.find_batch_size(batch) for batch in window]
        num_samples = sum(counts)
        num_items = self.accelerator.reduce(self._num_items(window), "sum") if self.compute_loss_func else None
        for i, (batch, count) in enumerate(zip(window, counts, strict=True), start=1):
            self._weight, last = count / num_samples, i == len(window)
            with nullcontext() if last else self.accelerator.no_sync(self.model_wrapped):
                self._loss_sum.add_(self.training_step(self.model_wrapped, batch, num_items), alpha=num_samples)
            if not last:
                self.call_event("on_substep_end")
        self._num_samples += num_samples
        progress, limit = self.progress, self.args.max_grad_norm
        progress.grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit) if limit else None
        self.call_event("on_pre_optimizer_step")
        self.optimizer.step()
        self.call_event("on_optimizer_step")
        progress.learning_rate = self.optimizer.param_groups[0]["lr"]
        if not self._plateau and not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | None = None) -> Tensor:
        """Forward and backward of one micro-batch; returns its detached share of the step's loss, a scalar.

        A mean loss is weighted with the micro-batch's share of the step's samples. A loss that was divided by
        `num_items_in_batch`, the items of all ranks, is multiplied by their number, because DDP averages over them.
        """
        loss = self._compute_loss(model, inputs, num_items_in_batch)
        loss = loss.mean() if loss.dim() else loss
        weight = self._weight if num_items_in_batch is None else self.accelerator.num_processes
        if weight != 1:
            loss = loss * weight
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch: Tensor | None = None):
        """The scalar loss of a batch, or (loss, outputs). Override it, and return a mean over the batch's samples.

        `num_items_in_batch` is for `compute_loss_func`, else None. An override may leave it out of its signature.
        """
        if self.compute_loss_func is None:
            outputs = batches.call_model(model, inputs)
            loss, _ = batches.loss_and_logits(outputs)
        else:
            inputs, labels = batches.split_labels(inputs, self.label_names)
            outputs = batches.call_model(model, inputs)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        if loss is None:
            raise ValueError("the model returned no loss: let it, pass compute_loss_func, or override compute_loss")
        return (loss, outputs) if return_outputs else loss

    def _compute_loss(self, model: nn.Module, inputs: Any, num_items: Tensor | None, **kwargs: Any) -> Any:
        count = {"num_items_in_batch": num_items} if self._loss_takes_count else {}
        return self.compute_loss(model, inputs, **count, **kwargs)

    def _num_items(self, window: list) -> Tensor:
        """Labels other than -100 in these batches of this rank, for a loss that asks for them."""
        return sum((batches.split_labels(batch, self.label_names)[1] != -100).sum() for batch in window)

    def _log_evaluate_save(self) -> None:
        """Do what the callbacks asked for after a step or an epoch."""
        if self.control.should_log:
            self._log_training()
        if self.control.should_evaluate:
            improved = self._note_best(self.evaluate())
            self.control.should_save = improved if self.args.save_strategy == "best" else self.control.should_save
        if self.control.should_save:
            self._save_checkpoint()
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False

    def _log_training(self) -> None:
        """Log the mean loss over the samples since the last time, if there are any."""
        self._read_device()
        progress = self.progress
        loss, samples = progress.loss - progress.logged_loss, progress.samples - progress.logged_samples
        if samples == 0:
            return
        progress.logged_loss, progress.logged_samples = progress.loss, progress.samples
        rates = {"grad_norm": progress.grad_norm, "learning_rate": progress.learning_rate}
        self.log({"loss": loss / samples, **rates})

    def _read_device(self) -> None:
        """Move the losses of all ranks, and the norm of the last step's gradients, from the device into `progress`.

        Before each save too, in every run: then the sums are added up in the same order with and without restarts.
        """
        progress = self.progress
        sums = torch.stack([self._loss_sum, torch.full_like(self._loss_sum, self._num_samples)])
        loss, samples = self.accelerator.reduce(sums, reduction="sum").tolist()
        progress.loss += loss
        progress.samples += round(samples)
        self._loss_sum.zero_()
        self._num_samples = 0
        if progress.grad_norm is None:
            progress.grad_norm = nn.utils.get_total_norm(p.grad for p in self.model.parameters() if p.grad is not None)
        progress.grad_norm, progress.learning_rate = float(progress.grad_norm), float(progress.learning_rate)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `logs`, with epoch and step, to the log history, and tell the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)

    def _note_best(self, metrics: dict[str, float]) -> bool:
        """Remember in the state, and return, whether the model is the best so far; tell the scheduler that watches."""
        args, state, key = self.args, self.state, self.args.best_metric_key
        if key is None:
            return False
        if key not in metrics:
            raise KeyError(f"metric_for_best_model needs {key!r}, but the evaluation gave {', '.join(metrics)}")
        if self._plateau:
            self.lr_scheduler.step(metrics[key])
        best, value = state.best_metric, metrics[key]
        improved = best is None or (value > best if args.greater_is_better else value < best)
        if improved:
            state.best_metric, state.best_global_step = value, state.global_step
        return improved

    def _save_checkpoint(self) -> None:
        self._read_device()
        state, output_dir = self.state, self.args.output_dir
        if state.best_global_step is not None:
            best = Path(output_dir, f"{checkpoint.PREFIX}{state.best_global_step}")
            if state.best_global_step == state.global_step or best.exists():
                state.best_model_checkpoint = str(best)
        own = {type(part).__name__: {"args": asdict(part), "attributes": {}} for part in (self.control, self.progress)}
        state.stateful_callbacks = self.callback_handler.states() | own
        checkpoint.save_checkpoint(self.accelerator, state, output_dir, self.args.save_total_limit)
        self.call_event("on_save")

    def _load_checkpoint(self, path: str) -> None:
        """Put everything back as it was."""
        self.accelerator.load_state(path)
        state, saved = self.state, TrainerState.load_from_json(f"{path}/{checkpoint.TRAINER_STATE_NAME}")
        # The rest of the state are settings, which may have changed.
        for name in ("epoch", "global_step", "log_history", "best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(state, name, getattr(saved, name))
        self.callback_handler.restore(saved.stateful_callbacks)
        self.progress = Progress(**saved.stateful_callbacks["Progress"]["args"])
        # A callback may have stopped the training for now; only its last step ends it for good.
        self.control = TrainerControl(should_training_stop=state.global_step >= state.max_steps)
        self.control.should_epoch_stop = saved.stateful_callbacks["TrainerControl"]["args"]["should_epoch_stop"]

    def _new_state(self, max_steps: int = 0, num_epochs: int = 0) -> TrainerState:
        state = TrainerState(max_steps=max_steps, num_train_epochs=num_epochs)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.is_local_process_zero = self.accelerator.is_local_main_process
        state.is_world_process_zero = self.accelerator.is_main_process
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(self.args, name)
            setattr(state, name, int(steps) if steps >= 1 else math.ceil(steps * max_steps))
        return state

    def evaluate(self, eval_dataset=None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"):
        """Evaluate on `eval_dataset`, by default the Trainer's; log the metrics and return them on all ranks.

        `<prefix>_loss` is the mean over the samples: the same for every batch size and number of processes. Of several
        sets in a dict each is evaluated with the prefix `<prefix>_<key>`.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            parts = [self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in dataset.items()]
            return {name: value for metrics in parts for name, value in metrics.items()}
        loader, loss_only = self.get_eval_dataloader(dataset), self.compute_metrics is None
        metrics = evaluation.evaluation_loop(self, loader, loss_only, ignore_keys, metric_key_prefix).metrics
        self.log(metrics)
        self.call_event("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test") -> evaluation.PredictionOutput:
        """The model's predictions for every sample of `test_dataset`, in its order, on all ranks; not logged."""
        loader = self.get_test_dataloader(test_dataset)
        output = evaluation.evaluation_loop(self, loader, False, ignore_keys, metric_key_prefix)
        self.call_event("on_predict", metrics=output.metrics)
        return output

    def prediction_step(self, model, inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None) -> tuple:
        """Loss (mean over the batch), logits and labels of one batch, each None where there is none.

        Without labels there is no loss, unless the model itself returns one under that name.
        """
        _, labels = batches.split_labels(inputs, self.label_names)
        with torch.no_grad(), self.accelerator.autocast():
            if labels is not None:
                num_items = self._num_items([inputs]) if self.compute_loss_func else None
                loss, outputs = self._compute_loss(model, inputs, num_items, return_outputs=True)
                _, logits = batches.loss_and_logits(outputs, ignore_keys)
            else:
                outputs = batches.call_model(model, inputs)
                loss, logits = batches.loss_and_logits(outputs, ignore_keys, labelled=False)
        loss = loss.detach().mean() if loss is not None else None
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def get_train_dataloader(self) -> DataLoader:
        """The prepared loader of the training set, shuffled; an override may return one that is not prepared."""
        dataset, batch_size = self.train_dataset, self.args.per_device_train_batch_size
        how = {"shuffle": not isinstance(dataset, IterableDataset), "drop_last": self.args.dataloader_drop_last}
        return self.accelerator.prepare(self._loader(dataset, batch_size, **how))

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """The loader of this rank's share of an evaluation set, in order and without padding.

        An override may return a plain loader of the whole set: it is sharded before use.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        loader = self._loader(dataset, self.args.per_device_eval_batch_size)
        return evaluation.shard_for_evaluation(loader, self.accelerator.device)

    get_test_dataloader = get_eval_dataloader

    def _loader(self, dataset: Dataset | None, batch_size: int, **how: Any) -> DataLoader:
        if dataset is None:
            raise ValueError("the Trainer has been given no dataset for this: pass train_dataset, eval_dataset or both")
        collator = self.data_collator
        if self.args.remove_unused_columns:
            collator = batches.ColumnFilter(collator, self.model, self.label_names)
        how["pin_memory"] = self.args.dataloader_pin_memory and self.accelerator.device.type != "cpu"
        return DataLoader(dataset, batch_size, collate_fn=collator, num_workers=self.args.dataloader_num_workers, **how)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Make `self.optimizer` unless there is one. Biases and normalisation layers get no weight decay."""
        if self.optimizer is None:
            self.optimizer = optimization.make_optimizer(self.model, self.args)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None) -> LRScheduler:
        """Make `self.lr_scheduler` unless there is one."""
        if self.lr_scheduler is None:
            self.lr_scheduler = optimization.make_scheduler(optimizer or self.optimizer, self.args, num_training_steps)
        return self.lr_scheduler

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Tell the callbacks that listen; they may steer the run through `self.control`."""
        listeners = self.callback_handler.listeners[event]
        if not listeners:
            return
        kwargs |= {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        kwargs |= {"train_dataloader": self.train_dataloader, "eval_dataloader": self.eval_dataloader}
        for listener in listeners:
            self.control = listener(self.args, self.state, self.control, **kwargs) or self.control

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a new instance of a callback class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first of a class; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    remove_callback = pop_callback

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the weights to `model.safetensors` in `output_dir`, by default `args.output_dir`, from all ranks."""
        self.accelerator.save_model(self.model, output_dir or self.args.output_dir)

    def save_state(self) -> None:
        """Write `trainer_state.json` to `args.output_dir`."""
        if self.is_world_process_zero():
            self.state.save_to_json(f"{self.args.output_dir}/{checkpoint.TRAINER_STATE_NAME}")

    def is_world_process_zero(self) -> bool:
        return self.accelerator.is_main_process

    def end(self) -> None:
        """Finish the trackers and leave the process group: the last call in a script."""
        self.accelerator.end_training()
