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

import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, RandomSampler

from common.args import parse_args
from common.data import collate, load_data
from common.model import build_model
from common.process_group import abort_on_error
from common.run import Run
from common.run.checkpointing import checkpoint_session
from common.run.trainer_callback import LadderCallback, finish
from common.trainer import Trainer, TrainingArguments


class DigitTrainer(Trainer):
    def get_train_dataloader(self):
        # By default an epoch's last, smaller step is a step too; elsewhere on the ladder an epoch is whole steps.
        args = self.args
        samples_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        samples_per_step *= self.accelerator.num_processes
        samples = len(self.train_dataset) // samples_per_step * samples_per_step
        sampler = RandomSampler(self.train_dataset, num_samples=samples)
        loader = DataLoader(
            self.train_dataset,
            args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=self.train_dataset.device.type != self.accelerator.device.type,
        )
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        log_probs = model(inputs["images"])  # by default model(**inputs), which is to return its loss
        loss = F.nll_loss(log_probs, inputs["labels"])
        return (loss, {"log_probs": log_probs}) if return_outputs else loss


def to_dict(batch):
    images, labels = collate(batch)
    return {"images": images, "labels": labels}


def compute_metrics(prediction):  # arrays with the samples of all ranks, each once
    log_probs, labels = prediction.predictions, prediction.label_ids
    # By default samples that are repeated, so that all processes have equally many, count twice in the loss.
    loss = -log_probs[range(len(labels)), labels].mean(dtype="float64")
    correct = log_probs.argmax(axis=1) == labels
    return {"loss": loss, "accuracy": correct.mean(), "evaluated": len(correct)}


def train(args):
    train_set, test_set = load_data(args)
    model = build_model(args)
    # By default AdamW has no weight decay, or leaves biases out of it. At the other levels all weights decay by 0.01.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    micro_batch = args.batch_size // world_size // args.gradient_accumulation_steps
    steps = len(train_set) // args.batch_size * args.epochs
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # from a launcher, whose word would beat the flag's
        os.environ["ACCELERATE_MIXED_PRECISION"] = args.mixed_precision
    training_args = TrainingArguments(
        args.checkpoint_dir or "checkpoints",
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        max_steps=min(steps, args.max_steps or steps),
        lr_scheduler_type="constant",  # by default linear, down to 0
        max_grad_norm=0,  # by default 1.0: gradients are clipped
        remove_unused_columns=False,  # by default only what model.forward takes reaches the collator
        label_names=["labels"],  # by default those parameters of model.forward whose names contain "label"
        eval_strategy="epoch",  # by default never
        logging_strategy="epoch",  # by default every 500 steps
        save_strategy="steps" if args.checkpoint_dir else "no",
        save_steps=args.checkpoint_every.steps,
        save_total_limit=2,
        seed=args.seed,
        data_seed=args.seed,  # of the sample order; by default what torch was last seeded with
        ddp_find_unused_parameters=False,  # by default DDP looks for them in every step
        dataloader_num_workers=args.num_workers,
        dataloader_pin_memory=args.data == "host",
        use_cpu=args.device.type == "cpu",
        ddp_timeout=int(args.timeout.total_seconds()),  # of a collective; by default 1800
        fp16=args.mixed_precision == "fp16",
        bf16=args.mixed_precision == "bf16",
        accelerator_config={"non_blocking": True},  # by default the CPU waits for each copy to the GPU
    )
    more = {"compute_metrics": compute_metrics, "optimizers": (optimizer, None)}
    trainer = DigitTrainer(model, training_args, to_dict, train_set, test_set, **more)
    device = trainer.accelerator.device
    run = Run(args, train_set, test_set, device)
    with abort_on_error():
        if trainer.is_world_process_zero():
            print(run.plan, flush=True)
        # By default all processes drop the same units out.
        torch.manual_seed(args.seed + trainer.accelerator.process_index)
        with checkpoint_session(args, device) as checkpoints:
            trainer.add_callback(LadderCallback(run, checkpoints, train_set.description))
            trainer.train(resume_from_checkpoint=checkpoints.can_resume("checkpoint-"))
        result = finish(run, model, trainer.state.log_history)
    trainer.end()
    return result


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    train(parse_args(__file__))


if __name__ == "__main__":
    main()
