"""Level 04: a Trainer. The loop is gone too: what remains is a model, data, a loss, and what differs from defaults.

As one process, as several, or as a configuration file says (--mixed-precision, --gradient-accumulation-steps,
--checkpoint-dir do what their names say):

    python 04_trainer/train.py
    torchrun --standalone --nproc-per-node 2 04_trainer/train.py
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 04_trainer/train.py

In a notebook, as often as you like: `notebook_launcher(train, (args,), num_processes=2)`.
The same file runs on Hugging Face's Trainer: replace `common.trainer` by `transformers`.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record

from common.args import parse_args
from common.clock import Clock, last_epoch
from common.data import collate, load_data
from common.model import build_model
from common.report import Run
from common.trainer import Trainer, TrainingArguments


class DigitTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        log_probs = model(inputs["images"])  # by default model(**inputs), which is to return its loss
        loss = F.nll_loss(log_probs, inputs["labels"])
        return (loss, {"log_probs": log_probs}) if return_outputs else loss


def to_dict(batch):
    return dict(zip(("images", "labels"), collate(batch), strict=True))


def compute_metrics(prediction):  # arrays with the samples of all ranks, each once
    correct = prediction.predictions.argmax(axis=1) == prediction.label_ids
    return {"accuracy": correct.mean(), "evaluated": len(correct)}


def train(args):
    train_set, test_set = load_data(args)
    model = build_model(args)
    # By default AdamW without weight decay, and with it biases are spared; elsewhere on the ladder all decay by 0.01.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    micro_batch = args.batch_size // int(os.environ.get("WORLD_SIZE", 1)) // args.gradient_accumulation_steps
    steps = len(train_set) // args.batch_size * args.epochs
    training_args = TrainingArguments(
        args.checkpoint_dir or "checkpoints",
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        max_steps=min(steps, args.max_steps or steps),
        lr_scheduler_type="constant",  # by default linear, down to 0
        max_grad_norm=0,  # by default 1.0: gradients are clipped
        dataloader_drop_last=True,  # by default an epoch's last, smaller batch is a step too
        remove_unused_columns=False,  # by default only what model.forward takes reaches the collator
        label_names=["labels"],  # by default the parameters of model.forward that are called so
        eval_strategy="epoch",  # by default never
        logging_strategy="epoch",  # by default every 500 steps
        save_strategy="steps" if args.checkpoint_dir else "no",
        save_steps=args.checkpoint_every,
        save_total_limit=2,
        seed=args.seed,  # of the sample order too
        dataloader_num_workers=args.num_workers,
        use_cpu=args.device.type == "cpu",
        ddp_timeout=int(args.timeout.total_seconds()),  # of a collective; by default 1800
        **({} if args.mixed_precision == "no" else {args.mixed_precision: True}),
    )
    more = {"compute_metrics": compute_metrics, "optimizers": (optimizer, None)}
    trainer = DigitTrainer(model, training_args, to_dict, train_set, test_set, **more)
    run = Run(args, train_set, test_set, trainer.accelerator.device)
    trainer.add_callback(Clock(run))
    try:
        saved = Path(training_args.output_dir).glob("checkpoint-*/*")
        trainer.train(resume_from_checkpoint=bool(args.checkpoint_dir) and any(saved))
        return run.result(model, *last_epoch(trainer.state.log_history))
    finally:
        trainer.end()


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
