"""A template for level 04: a Trainer. It imports nothing of this repository but the Trainer.

    torchrun --standalone --nproc-per-node 2 04_trainer/template.py DATA --epochs 10 --checkpoint run

The same file runs on Hugging Face's Trainer: replace `common.trainer` by `transformers`.

For a task of your own change three places: `Images` with `load_data`, `build_network`, `compute_loss` with `score`.
With --checkpoint it saves after each epoch. After Ctrl-C the same command goes on with the epoch that was cut short.
If Hugging Face's is killed while it saves, half a checkpoint stays. Remove it before you run the command again.
"""

import argparse
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.utils.data import RandomSampler, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from common.trainer import Trainer, TrainerCallback, TrainingArguments


class Images(ImageFolder):
    """Samples (inputs, target): the network is called with the inputs, which are a tuple, here of one image."""

    def __init__(self, folder, transform, seed):
        super().__init__(folder, transform)
        self.seed = seed
        self.epoch = 0  # NextEpoch counts it

    def __getitem__(self, index):
        # Each image has a seed of its own in each epoch, so its crop does not depend on the process that reads it.
        with torch.random.fork_rng(devices=[]):  # afterwards the generator is as before: dropout draws from it too
            torch.default_generator.manual_seed(self.seed + self.epoch * len(self) + index)  # seeds no GPU's
            image, label = super().__getitem__(index)
        return (image,), label


def load_data(args):
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    to_numbers = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    augment = v2.Compose([v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), *to_numbers])
    centre = v2.Compose([v2.Resize(args.size), v2.CenterCrop(args.size), *to_numbers])
    train_set = Images(f"{args.data}/train", augment, args.seed)
    val_set = Images(f"{args.data}/val", centre, args.seed)
    if val_set.classes != train_set.classes:  # a class would have another number in the evaluation
        raise SystemExit(f"{train_set.root} and {val_set.root} must have the same classes")
    return train_set, val_set


def build_network(args, train_set):
    return torchvision.models.get_model(args.arch, num_classes=len(train_set.classes))


def compute_loss(outputs, targets):
    return F.cross_entropy(outputs, targets)


def score(outputs, targets):
    """A number for each sample, whose mean is the score that is shown: here the accuracy."""
    return (outputs.argmax(dim=1) == targets).double()


def cosine_schedule(optimizer, steps):
    """The learning rate falls to 0 in `steps` steps, along half a wave of a cosine."""
    # A resumed run may have more epochs. CosineAnnealingLR would keep the number of steps that it was saved with.
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)


class TaskTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        # By default the Trainer makes a step of an epoch's tail too. dataloader_drop_last=True would drop the tail, but
        # Hugging Face's then drops it in the evaluation as well.
        step = self.args.per_device_train_batch_size * self.args.world_size
        return RandomSampler(self.train_dataset, num_samples=len(self.train_dataset) // step * step)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(*inputs["inputs"])
        loss = compute_loss(outputs, inputs["labels"])
        return (loss, {"outputs": outputs}) if return_outputs else loss

    def evaluate(self, *args, **kwargs):
        # Each rank has batch norm's statistics of its own shards. For the evaluation, all take those of rank 0.
        if dist.is_initialized():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)
        return super().evaluate(*args, **kwargs)


class NextEpoch(TrainerCallback):
    """Tells the data set the number of the epoch."""

    def on_epoch_begin(self, args, state, control, train_dataloader, **kwargs):
        train_dataloader.dataset.epoch = round(state.epoch)


class RateOfSchedule(TrainerCallback):
    """Gives the optimizer of a resumed run the rate of its own schedule: the saved run may have had another one."""

    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **kwargs):
        lr_scheduler.base_lrs = [optimizer.defaults["lr"] for _ in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * lr_scheduler.lr_lambdas[0](lr_scheduler.last_epoch)


def to_dict(batch):
    inputs, targets = default_collate(batch)
    return {"inputs": inputs, "labels": targets}


def mean_score(prediction):
    outputs, targets = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
    return {"score": score(outputs, targets).mean().item()}


def train(args):
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be divided among {world_size} processes")
    share = args.batch_size // world_size
    training_args = TrainingArguments(
        args.checkpoint or ".",  # the Trainer makes the folder if it is not there, even to save nothing
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share,
        num_train_epochs=args.epochs,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        logging_strategy="epoch",  # the training loss is logged
        save_strategy="epoch" if args.checkpoint else "no",
        save_total_limit=2,
        seed=args.seed,
        data_seed=args.seed,  # the order of the samples depends on it
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    train_set, val_set = load_data(args)
    if len(train_set) < args.batch_size:
        raise SystemExit(f"{len(train_set)} training samples do not fill a batch of {args.batch_size}")
    torch.manual_seed(args.seed)
    model = build_network(args, train_set)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = cosine_schedule(optimizer, args.epochs * (len(train_set) // args.batch_size))
    trainer = TaskTrainer(  # joins the other processes
        model,
        training_args,
        data_collator=to_dict,
        train_dataset=train_set,
        eval_dataset=val_set,
        compute_metrics=mean_score,
        optimizers=(optimizer, schedule),
        callbacks=[NextEpoch, RateOfSchedule],
    )
    if trainer.is_world_process_zero() and args.checkpoint:  # fail before the training, not after an epoch
        tempfile.TemporaryFile(dir=args.checkpoint).close()
    torch.manual_seed(args.seed + training_args.process_index)  # else all would drop the same units
    found = [bool(args.checkpoint) and any(Path(args.checkpoint).glob("checkpoint-*"))]
    if dist.is_initialized():
        dist.broadcast_object_list(found)  # rank 0 has looked, so all ranks resume or none does
    trainer.train(resume_from_checkpoint=found[0])
    trainer.accelerator.end_training()  # leaves the other processes
    return model


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
    parser.add_argument("--arch", default="resnet18", help="a name from torchvision.models")
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of an optimizer step, on all devices")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--workers", type=int, default=2, help="loader workers of each process")
    parser.add_argument("--checkpoint", help="folder to save to after each epoch, and to continue from")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse_args())
