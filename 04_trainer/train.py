"""Level 04: a Trainer. The loop is gone too: what remains is a model, data, a loss, and what differs from defaults.

As one process, as several, or as a configuration file says:

    python 04_trainer/train.py
    torchrun --standalone --nproc-per-node 2 04_trainer/train.py
    python -m common.accelerator launch --config_file 03_accelerate/two_processes.yaml 04_trainer/train.py

`common.trainer` has the names of Hugging Face's Trainer. Replace it by `transformers`, and this file runs there. Inside
is level 03's Accelerator. Mixed precision, accumulation and checkpoints are in train_full.py.
"""

import torch
import torch.nn.functional as F

from common.accelerator import PartialState
from common.args import parse_args
from common.data import collate, load_data
from common.instruments import measured
from common.model import build_model
from common.start import prepare_process
from common.trainer import Trainer, TrainingArguments


class DigitTrainer(Trainer):
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
    settings = TrainingArguments(
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size // process.num_processes,
        per_device_eval_batch_size=args.batch_size // process.num_processes,
        eval_strategy="epoch",  # by default never
        logging_strategy="epoch",  # by default every 500 steps
        save_strategy="no",  # by default every 500 steps
        seed=args.seed,
        remove_unused_columns=False,  # by default only what model.forward takes reaches the collator
        label_names=["labels"],  # compute_metrics gets them; by default what model.forward calls "label…"
        dataloader_num_workers=args.num_workers,
        dataloader_pin_memory=train_set.device.type != args.device.type,  # by default always
        accelerator_config={"non_blocking": True},  # by default the CPU waits for a copy to the GPU
        use_cpu=args.device.type == "cpu",
        # The rest makes this the same training as at the other levels. It is no advice.
        data_seed=args.seed,  # of the sample order; by default what torch was last seeded with
        dataloader_drop_last=True,  # by default an epoch ends with a smaller step
        lr_scheduler_type="constant",  # by default linear, down to 0
        max_grad_norm=0,  # by default 1.0: gradients are clipped
        ddp_find_unused_parameters=False,  # by default DDP looks for them in every step
    )
    trainer = DigitTrainer(
        model, settings, to_dict, train_set, test_set, compute_metrics=compute_metrics, optimizers=(optimizer, None)
    )  # by default it makes an AdamW without weight decay
    torch.manual_seed(args.seed + process.process_index)  # by default all processes drop the same units out

    with measured(args, model, train_set, test_set) as report:  # counts steps, takes the time, prints what is reported
        trainer.train()
        last = {}
        for entry in trainer.state.log_history:  # later values replace earlier ones
            last.update(entry)
        result = report(last["loss"], last["eval_loss"], last["eval_accuracy"], last["eval_evaluated"])
    trainer.accelerator.end_training()
    return result


if __name__ == "__main__":
    args = prepare_process(parse_args(__file__))  # device, cores and memory, before torch computes
    train(args)
