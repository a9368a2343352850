"""Level 04: a Trainer. The loop is gone too: what remains is a model, data, a loss, and what differs from defaults.

As one process, as several, or as a configuration file says:

    python 04_trainer/train.py
    torchrun --standalone --nproc-per-node 2 04_trainer/train.py
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 04_trainer/train.py

`common.trainer` has the names of Hugging Face's Trainer. Replace it by `transformers`, and this file runs there. Inside
is level 03's Accelerator. What is set against a default makes this the training of the other levels; it is no advice.
Mixed precision, accumulation and checkpoints are in train_full.py.
"""

import os

import torch
import torch.nn.functional as F

from common.args import parse_args
from common.data import collate, load_data
from common.instruments import measured, prepare_process
from common.model import build_model
from common.trainer import Trainer, TrainingArguments


class DigitTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        log_probs = model(inputs["images"])  # by default model(**inputs), which is to return its loss
        loss = F.nll_loss(log_probs, inputs["labels"])
        return (loss, {"log_probs": log_probs}) if return_outputs else loss


def to_dict(batch):
    images, labels = collate(batch)
    return {"images": images, "labels": labels}


def compute_metrics(prediction):  # arrays with the samples of all ranks, each once
    log_probs, labels = prediction.predictions, prediction.label_ids
    # In the Trainer's own loss, which this replaces, samples count twice that were repeated for equal shards.
    loss = -log_probs[range(len(labels)), labels].mean(dtype="float64")
    correct = log_probs.argmax(axis=1) == labels
    return {"loss": loss, "accuracy": correct.mean(), "evaluated": len(correct)}


def train(args):
    share = args.batch_size // int(os.environ.get("WORLD_SIZE", 1))
    settings = TrainingArguments(
        "checkpoints",  # the folder for what it saves: here nothing
        num_train_epochs=args.epochs,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        dataloader_drop_last=True,  # by default an epoch ends with a smaller step
        lr_scheduler_type="constant",  # by default linear, down to 0
        max_grad_norm=0,  # by default 1.0: gradients are clipped
        remove_unused_columns=False,  # by default only what model.forward takes reaches the collator
        label_names=["labels"],  # compute_metrics gets them; by default what model.forward calls "label…"
        eval_strategy="epoch",  # by default never
        logging_strategy="epoch",  # by default every 500 steps
        save_strategy="no",  # by default every 500 steps
        seed=args.seed,
        data_seed=args.seed,  # of the sample order; by default what torch was last seeded with
        ddp_find_unused_parameters=False,  # by default DDP looks for them in every step
        ddp_timeout=int(args.timeout.total_seconds()),  # of a collective; by default 1800
        dataloader_num_workers=args.num_workers,
        dataloader_pin_memory=False,  # by default batches are pinned, for faster copies to a GPU
        use_cpu=args.device.type == "cpu",
    )
    rank = settings.process_index  # joins the other processes: before load_data, so that all get the same set
    train_set, test_set = load_data(args)
    model = build_model(args)
    # The Trainer's own AdamW has no weight decay by default, and never of biases. torch's decays all weights by 0.01.
    optimizers = torch.optim.AdamW(model.parameters(), lr=args.lr), None
    trainer = DigitTrainer(
        model, settings, to_dict, train_set, test_set, compute_metrics=compute_metrics, optimizers=optimizers
    )
    torch.manual_seed(args.seed + rank)  # by default all processes drop the same units out

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints the result once
        trainer.train()
        log = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
        result = report(log["loss"], log["eval_loss"], log["eval_accuracy"], log["eval_evaluated"])
    trainer.accelerator.end_training()
    return result


if __name__ == "__main__":
    args = parse_args(__file__)
    prepare_process(args)  # its device, cores and memory, before torch computes
    train(args)
