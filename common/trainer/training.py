"""A training, from its beginning to its end: epochs, windows of micro-batches, and what follows a step.

Read it from the top. A *window* consists of the micro-batches whose gradients are added up for one optimizer step.
Sums, draws and events come in the order that they have in `transformers`, so that a training ends with the same bits.

These functions are no methods of the Trainer, because no subclass overrides them. What a subclass may override is a
method that they call, `trainer.training_step` or `trainer._save_checkpoint`, and bears the original's name. They take
the Trainer as `Any`: the module of its class imports theirs, and no modules of this repository import each other.
"""

import time
from contextlib import closing, nullcontext
from typing import Any

from common.accelerator.logging import get_logger
from common.trainer import checkpoint, evaluation, loading, optimization, pretrained
from common.trainer.loss_log import LossLog
from common.trainer.progress import Progress, make_plan
from common.trainer.trainer_callback import TrainerState
from common.trainer.training_args import TrainingArguments, resolve_steps

logger = get_logger(__name__)


def run_training(trainer: Any, folder: str | None) -> evaluation.TrainOutput:
    """Train from the beginning, or go on from the checkpoint in `folder`."""
    set_up(trainer)
    skipped = None if folder is None else checkpoint.resume(trainer, folder)
    start_time = time.time()
    first_step = trainer.state.global_step

    trainer.call_event("on_train_begin")
    progress = trainer.progress
    # As in `transformers`, a new run makes a step even if a callback stops it in on_train_begin.
    is_over = folder is not None and (trainer.control.should_training_stop or first_step >= trainer.state.max_steps)
    if is_over:
        trainer.control.should_training_stop = True
        if not progress.epoch_ended:  # the run was killed before its last epoch was evaluated and saved
            end_epoch(trainer)
    while not is_over and progress.epoch < progress.plan.num_epochs:
        train_epoch(trainer, skipped)
        skipped = None
        is_over = trainer.control.should_training_stop

    output = log_results(trainer, start_time, first_step)
    warn_if_best_is_not_saved(trainer)
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.call_event("on_train_end")
    return output


def set_up(trainer: Any) -> None:
    """Make all that belongs to one training: the loader, progress, state, optimizer, schedule and wrapped model."""
    args = trainer.args
    accelerator = trainer.accelerator
    if args.activation_checkpointing:
        pretrained.enable_activation_checkpointing(trainer.model, args.activation_checkpointing_kwargs)
    pretrained.align_special_tokens(trainer.model, trainer.processing_class)
    accelerator.free_memory()
    if trainer.model_wrapped is trainer.model:
        # An evaluation may have prepared it without DDP, and another Trainer in another precision.
        accelerator.forget_model(trainer.model)

    trainer.train_dataloader = loading.deal_out(trainer.get_train_dataloader(), accelerator)
    plan = make_plan(args, trainer.train_dataloader, accelerator.num_processes)
    state = TrainerState(
        max_steps=plan.max_steps,
        num_train_epochs=plan.num_epochs,
        train_batch_size=args.per_device_train_batch_size,
        is_local_process_zero=accelerator.is_local_main_process,
        is_world_process_zero=accelerator.is_main_process,
    )
    resolve_intervals(args, state)
    # Not before: if the settings are refused, both are those of the last training.
    trainer.state = state
    trainer.progress = Progress(plan, LossLog(accelerator.device))

    if trainer._created_lr_scheduler:
        trainer.lr_scheduler = None
        trainer._created_lr_scheduler = False
    trainer.create_optimizer_and_scheduler(plan.max_steps)
    trainer.model_wrapped, trainer.optimizer = accelerator.prepare(trainer.model_wrapped, trainer.optimizer)
    # Checkpoints hold the schedule. The Trainer steps it itself, so callbacks get torch's own and not the wrapper.
    accelerator.prepare_scheduler(trainer.lr_scheduler)
    trainer.callback_handler.model = trainer.model
    trainer.callback_handler.optimizer = trainer.optimizer
    trainer.callback_handler.lr_scheduler = trainer.lr_scheduler
    trainer.callback_handler.train_dataloader = trainer.train_dataloader
    trainer.model_wrapped.zero_grad()


def resolve_intervals(args: TrainingArguments, state: TrainerState) -> None:
    """Put the steps between logs, evaluations and checkpoints into `state`; the settings may be shares of all steps."""
    state.logging_steps = resolve_steps(args.logging_steps, state.max_steps)
    state.save_steps = resolve_steps(args.save_steps, state.max_steps)
    if args.eval_steps is not None:
        state.eval_steps = resolve_steps(args.eval_steps, state.max_steps)
    loads_best_of_steps = args.load_best_model_at_end and args.save_strategy == "steps"
    if loads_best_of_steps and state.save_steps % state.eval_steps:
        raise ValueError(
            f"load_best_model_at_end: save_steps={args.save_steps} are {state.save_steps} of {state.max_steps} steps "
            f"and eval_steps={args.eval_steps} are {state.eval_steps}: save only after evaluations"
        )


def train_epoch(trainer: Any, skipped: loading.SkippedBatches | None) -> None:
    progress = trainer.progress
    plan = progress.plan
    progress.epoch_ended = False
    trainer.call_event("on_epoch_begin")
    sizes = plan.window_sizes(progress.batches)
    windows = loading.read_windows(trainer.train_dataloader, progress.epoch, sizes, skipped, trainer.accelerator)
    # Open until the end of the epoch is saved, because a checkpoint holds the loader's position.
    with closing(windows):
        for window in windows:
            train_window(trainer, window)
            if is_stopped(trainer):
                break
        batches_of_first_step = min(plan.accumulation, plan.batches_per_epoch)
        # A stream as short as this would be read again and again, for ever.
        if progress.batches < batches_of_first_step and not is_stopped(trainer):
            logger.warning(
                f"epoch {progress.epoch} has {progress.batches} batches, too few for a step: training stops after "
                f"{trainer.state.global_step} of {trainer.state.max_steps} steps"
            )
            trainer.control.should_training_stop = True
        end_epoch(trainer)


def train_window(trainer: Any, window: list[Any]) -> None:
    """Train on each micro-batch of a window, and make an optimizer step, unless a callback stops it before."""
    accelerator = trainer.accelerator
    progress = trainer.progress
    num_items = trainer._get_num_items_in_batch(window, accelerator.device)
    trainer.current_gradient_accumulation_steps = len(window)
    trainer.call_event("on_step_begin")
    for number, inputs in enumerate(window, start=1):
        # In a stream's incomplete last window no micro-batch ends a step. The next step adds these gradients.
        ends_step = progress.plan.ends_step(progress.batches + 1)
        accelerator.sync_gradients = ends_step
        # The ranks average their gradients in the last micro-batch of a window.
        averaging = nullcontext() if number == len(window) else accelerator.no_sync(trainer.model_wrapped)
        with averaging:
            loss = trainer.training_step(trainer.model_wrapped, inputs, num_items)
        progress.batches += 1
        progress.loss_log.add(loss, trainer.state.global_step, trainer.args.logging_nan_inf_filter)
        if ends_step:
            optimizer_step(trainer)
            trainer.call_event("on_step_end")
            log_evaluate_save(trainer)
        else:
            trainer.call_event("on_substep_end")
            if is_stopped(trainer):
                break


def optimizer_step(trainer: Any) -> None:
    """One optimizer step with the gradients of a window. It waits for the device in fp16 only."""
    # Without a limit this measures the norm and leaves finite gradients alone.
    limit = trainer.args.max_grad_norm if trainer.args.max_grad_norm > 0 else float("inf")
    grad_norm = trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), limit)
    trainer.call_event("on_pre_optimizer_step")
    trainer.optimizer.step()
    trainer.call_event("on_optimizer_step")
    learning_rate = trainer._get_learning_rate()
    if not optimization.follows_metric(trainer.lr_scheduler) and not trainer.accelerator.optimizer_step_was_skipped:
        trainer.lr_scheduler.step()
    trainer.model_wrapped.zero_grad()
    progress = trainer.progress
    progress.loss_log.end_step(learning_rate, grad_norm)
    trainer.state.global_step += 1
    trainer.state.epoch = progress.epoch + progress.batches / progress.plan.batches_per_epoch


def log_evaluate_save(trainer: Any) -> None:
    """Log, evaluate and save, as far as the callbacks have asked for it after a step or an epoch."""
    loss_log = trainer.progress.loss_log
    if trainer.control.should_log and trainer.state.global_step > loss_log.logged_step:
        logs = {"loss": loss_log.take_mean(trainer.accelerator, trainer.state.global_step)}  # it waits for the device
        logs["grad_norm"] = float(loss_log.grad_norm)
        logs["learning_rate"] = float(loss_log.learning_rate)
        trainer.log(logs)
    if trainer.control.should_evaluate:
        metrics = trainer.evaluate(ignore_keys=None)  # named, as in the original: an override may take keywords alone
        if trainer.args.best_metric_key is not None or optimization.follows_metric(trainer.lr_scheduler):
            follow_metric(trainer, metrics)
    if trainer.control.should_save:
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        trainer.call_event("on_save")


def follow_metric(trainer: Any, metrics: dict[str, Any]) -> None:
    """Step a plateau schedule by `metric_for_best_model`, and note the metric if it is the best so far."""
    args = trainer.args
    state = trainer.state
    key = args.best_metric_key
    if key not in metrics:
        raise KeyError(f"metric_for_best_model needs {key!r}, but the evaluation gave {', '.join(metrics)}")
    metric = metrics[key]
    if optimization.follows_metric(trainer.lr_scheduler):
        trainer.lr_scheduler.step(metric)
    if state.best_metric is None:
        # NaN is never the best, but there is a best metric after a first one that is NaN.
        state.best_metric = float("-inf") if args.greater_is_better else float("inf")
    is_best = bool(metric > state.best_metric if args.greater_is_better else metric < state.best_metric)
    if is_best:
        state.best_metric = metric
        if args.save_strategy != "no":
            state.best_global_step = state.global_step
    if args.save_strategy == "best":
        trainer.control.should_save = is_best


def end_epoch(trainer: Any) -> None:
    """End an epoch, of which all batches are done, or which a callback has stopped before."""
    progress = trainer.progress
    # A stream may have fewer batches than planned: it is at its end if nobody has stopped it.
    is_whole = progress.batches == progress.plan.batches_per_epoch or not is_stopped(trainer)
    trainer.call_event("on_epoch_end")
    progress.epoch_ended = True
    # A training that was stopped within an epoch goes on in it when it is resumed.
    if is_whole or trainer.control.should_epoch_stop:
        progress.epoch += 1
        progress.batches = 0
    log_evaluate_save(trainer)


def is_stopped(trainer: Any) -> bool:
    return trainer.control.should_epoch_stop or trainer.control.should_training_stop


def log_results(trainer: Any, start_time: float, first_step: int) -> evaluation.TrainOutput:
    """Log the results of a run that began at `start_time` and `first_step`, and return them."""
    state = trainer.state
    loss_log = trainer.progress.loss_log
    # The steps since the last log count with this rank's loss alone, so `training_loss` may differ between ranks.
    train_loss = (loss_log.total + loss_log.since_log.item()) / max(state.global_step, 0.001)
    num_steps = state.global_step - first_step
    num_samples = num_steps * trainer.progress.plan.samples_per_step
    metrics = evaluation.speed_metrics("train", start_time, num_samples, num_steps)
    metrics["total_flos"] = state.total_flos
    metrics["train_loss"] = train_loss
    trainer.log(metrics)
    return evaluation.TrainOutput(state.global_step, train_loss, metrics)


def warn_if_best_is_not_saved(trainer: Any) -> None:
    state = trainer.state
    if state.best_global_step is not None and state.best_global_step not in trainer.progress.saved_steps:
        logger.warning(
            f"the best evaluation was at step {state.best_global_step}, where no checkpoint was saved: "
            f"best_model_checkpoint is {state.best_model_checkpoint}. save_strategy='best' saves where it is best"
        )
