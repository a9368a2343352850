"""Level 04 with what a long training adds: gradient accumulation, mixed precision, and checkpoints to resume from.

    python 04_trainer/train_full.py --gradient-accumulation-steps 4 --mixed-precision bf16
    torchrun --standalone --nproc-per-node 2 04_trainer/train_full.py --checkpoint-dir checkpoints

With --checkpoint-dir, SIGTERM and Ctrl-C save a checkpoint within ten further steps, if the training has so many left,
and the same command continues a run that was stopped or killed.
The same file runs on Hugging Face's Trainer: replace `common.trainer` by `transformers`. Its checkpoints do not hold
`SameTraining`, so a run with another batch size is not refused there.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import RandomSampler

from common.accelerator import PartialState
from common.args import parse_args
from common.checkpoints.checks import SameTraining, has_checkpoint, refuse_longer_training, refuse_not_finite
from common.checkpoints.schedule import CheckpointSchedule
from common.checkpoints.signals import caught_signals, stop_run
from common.data import collate, load_data
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process
from common.trainer import Trainer, TrainerCallback, TrainingArguments


class DigitTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):  # the hook of transformers for a sampler
        # An epoch is whole steps. dataloader_drop_last would keep micro-batches at its end that are too few for a step.
        # No seed is given: the Accelerator replaces the sampler by one that orders epoch e by data_seed + e.
        args = self.args
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return RandomSampler(self.train_dataset, num_samples=len(self.train_dataset) // step * step)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        log_probs = model(inputs["images"])  # by default model(**inputs), which has to return a loss
        loss = F.nll_loss(log_probs, inputs["labels"])
        return (loss, {"log_probs": log_probs}) if return_outputs else loss


def to_dict(batch):
    images, labels = collate(batch)
    return {"images": images, "labels": labels}


def compute_metrics(prediction):  # arrays with the samples of all ranks, each once
    correct = prediction.predictions.argmax(axis=1) == prediction.label_ids
    return {"accuracy": correct.mean(), "evaluated": len(correct)}


def train(args):
    process = PartialState(cpu=args.device.type == "cpu", timeout=args.timeout)  # joins the other processes
    train_set, test_set = load_data(args)
    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    share = args.batch_size // process.num_processes // args.gradient_accumulation_steps
    settings = TrainingArguments(
        args.checkpoint_dir or "checkpoints",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        eval_strategy="epoch",  # by default never
        logging_strategy="epoch",  # by default every 500 steps
        save_strategy="no",  # by default every 500 steps; here ScheduledSaves alone says when
        save_total_limit=2,  # by default all checkpoints stay
        seed=args.seed,
        remove_unused_columns=False,  # by default only what model.forward takes reaches the collator
        label_names=["labels"],  # compute_metrics gets them; by default what model.forward calls "label…"
        dataloader_num_workers=args.num_workers,
        dataloader_pin_memory=train_set.device.type != args.device.type,  # by default always
        accelerator_config={"non_blocking": True},  # by default the CPU waits for a copy to the GPU
        use_cpu=args.device.type == "cpu",
        # The rest makes this the same training as at the other levels. It is no advice.
        data_seed=args.seed,  # of the sample order; by default what torch was last seeded with
        lr_scheduler_type="constant",  # by default linear, down to 0
        max_grad_norm=0,  # by default 1.0: gradients are clipped
        ddp_find_unused_parameters=False,  # by default DDP looks for them in every step
    )
    settings.mixed_precision = args.mixed_precision  # fp16= and bf16= cannot say "no" to the launcher
    optimizers = (optimizer, None)  # by default the Trainer makes an AdamW without weight decay
    trainer = DigitTrainer(
        model, settings, to_dict, train_set, test_set, compute_metrics=compute_metrics, optimizers=optimizers
    )
    trainer.accelerator.register_for_checkpointing(SameTraining(args.batch_size, args.seed, train_set))
    torch.manual_seed(args.seed + process.process_index)  # else all would drop the same units

    saves = bool(args.checkpoint_dir)
    resumes = saves and has_checkpoint(args.checkpoint_dir, "checkpoint-*")
    with caught_signals(enabled=saves) as signals, measured(args, model, train_set, test_set, resumes) as report:
        total_steps = len(train_set) // args.batch_size * args.epochs
        schedule = CheckpointSchedule(args.checkpoint_every, total_steps, signals, trainer.accelerator.device)
        scheduled_saves = ScheduledSaves(schedule)
        if saves:
            trainer.add_callback(scheduled_saves)
        trainer.train(resume_from_checkpoint=resumes)
        steps = trainer.state.global_step
        if scheduled_saves.stops:
            stop_run(steps, signals)  # ends the process
        last = {}  # the newest value of each name: the log has the loss and the evaluation in entries of their own
        for entry in trainer.state.log_history:
            last.update(entry)
        result = report(last["loss"], last["eval_loss"], last["eval_accuracy"], last["eval_evaluated"], steps=steps)
    trainer.accelerator.end_training()
    return result


class ScheduledSaves(TrainerCallback):
    """Callback by which all ranks save at the steps of the schedule, and end the training after a signal.

    The Trainer calls `on_train_begin` when it has loaded a checkpoint. After a step it calls `on_step_end`, saves if
    the callback asks for it, and calls `on_epoch_end` if the epoch or the training ends.
    """

    def __init__(self, schedule):
        self.schedule = schedule
        self.stops = False

    def on_train_begin(self, args, state, control, **kwargs):
        steps_per_epoch = state.max_steps // args.num_train_epochs
        refuse_longer_training(args.num_train_epochs, state.global_step, steps_per_epoch)

    def on_step_end(self, args, state, control, model, **kwargs):
        decision = self.schedule.decide(state.global_step)
        if decision.save:
            refuse_not_finite(model, state.global_step)
            control.should_save = True
        if decision.stop:
            self.stops = True
            control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stops:  # the Trainer would log and evaluate a part of an epoch as if it were the whole
            control.should_log = False
            control.should_evaluate = False


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
